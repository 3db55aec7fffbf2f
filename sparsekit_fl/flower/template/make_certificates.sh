#!/bin/sh
# Keys for a SuperLink and its SuperNodes: sh make_certificates.sh [SERVER_NAME_OR_IP [NODES [FOLDER]]]
set -eu
server=${1:-localhost}
nodes=${2:-2}
folder=${3:-keys}
mkdir -p "$folder"
chmod 700 "$folder"
cd "$folder"
if [ -e ca.key ]; then
    echo "$folder already holds keys; remove it, or name another folder" >&2
    exit 1
fi
case "$server" in
    *[!0-9.]*) also="DNS:$server" ;;
    *) also="IP:$server" ;;
esac
openssl genrsa -out ca.key 4096 2>/dev/null
openssl req -x509 -new -nodes -key ca.key -sha256 -days 365 -subj "/CN=sparsekit-ca" \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" -out ca.crt
openssl genrsa -out server.key 4096 2>/dev/null
openssl req -new -key server.key -subj "/CN=$server" -out server.csr
cat > server.ext <<END
subjectAltName=$also,DNS:localhost,IP:127.0.0.1
basicConstraints=CA:FALSE
keyUsage=digitalSignature,keyEncipherment
extendedKeyUsage=serverAuth
END
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -sha256 -extfile server.ext -out server.pem 2>/dev/null
rm server.csr server.ext
node=0
while [ "$node" -lt "$nodes" ]; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -f "node-$node" -C ""
    node=$((node + 1))
done
chmod 600 ./*.key
echo "$folder: ca.crt server.pem server.key, and node-0 to node-$((nodes - 1)) with their .pub files"
