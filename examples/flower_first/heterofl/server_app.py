"""The server of a Flower app, which sends each client the submodel that fits it: HeteroFL."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from submodel import GRAPH, first_units
from task import Net

import sparsekit as sk

RATIOS = (1.0, 0.5, 0.25)

app = ServerApp()


class HeteroFL(FedAvg):
    """FedAvg in which each entry is the mean over the clients that train it."""

    def ratio(self, node):
        """Return the share of units that a node trains."""
        return RATIOS[node % len(RATIOS)]

    def configure_train(self, server_round, arrays, config, grid):
        """Send each client its submodel."""
        self.state = arrays.to_torch_state_dict()
        whole = Net()
        whole.load_state_dict(self.state)
        for message in super().configure_train(server_round, arrays, config, grid):
            node = message.metadata.dst_node_id
            part = sk.compact(whole, GRAPH, first_units(self.ratio(node))).state_dict()
            own = ConfigRecord({**message.content["config"], "ratio": self.ratio(node)})
            yield Message(RecordDict({"arrays": ArrayRecord(part), "config": own}), node, message.metadata.message_type)

    def aggregate_train(self, server_round, replies):
        """Merge the submodels, and give the merged model to FedAvg as the model of every client."""
        replies = list(replies)
        good = [reply for reply in replies if not reply.has_error()]
        zeros = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in self.state.items()}
        total, held = dict(zeros), dict(zeros)
        for reply in good:
            part, mask = reply.content["arrays"].to_torch_state_dict(), first_units(self.ratio(reply.metadata.src_node_id))
            weight = reply.content["metrics"]["num-examples"]
            ones = sk.expand({name: torch.ones_like(one).double() for name, one in part.items()}, GRAPH, mask, into=zeros)
            values = sk.expand({name: one.double() for name, one in part.items()}, GRAPH, mask, into=zeros)
            total = {name: one + weight * values[name] for name, one in total.items()}
            held = {name: one + weight * ones[name] for name, one in held.items()}
        merged = {
            name: torch.where(held[name] > 0, total[name] / held[name].clamp(min=1e-9), one.double()).to(one.dtype)
            for name, one in self.state.items()
        }
        for reply in good:
            reply.content["arrays"] = ArrayRecord(merged)
        return super().aggregate_train(server_round, replies)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    rounds = context.run_config["num-server-rounds"]
    strategy = HeteroFL(fraction_train=1.0, fraction_evaluate=1.0)
    config = ConfigRecord({"lr": context.run_config["learning-rate"]})
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), train_config=config, num_rounds=rounds)
    print(result.evaluate_metrics_clientapp[rounds])
