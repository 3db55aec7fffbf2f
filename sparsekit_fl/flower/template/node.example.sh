#!/bin/sh
# One device: sh node.example.sh NUMBER. Change what stands here to what this device has.
set -eu
number=${1:?the number of this device: sh node.example.sh 0}
server=127.0.0.1:8000        # address of the SuperLink
clients="$number"            # ids of the clients that this device serves: 3, or 0-9, or 0-3,7
data=$HOME/data              # folder of the data, as in DATA/mnist/…; digits need none
state=$HOME/.sparsekit-state # where the memories and personal models of its clients stay

export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
exec flower-supernode --superlink "$server" --root-certificates keys/ca.crt --auth-supernode-private-key "keys/node-$number" \
    --port "$((9100 + number))" --node-config "clients=\"$clients\" data-dir=\"$data\" state-dir=\"$state\""
