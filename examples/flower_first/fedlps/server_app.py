"""The server of a Flower app, which learns how large the submodel of each client is: FedLPS."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import EXAMPLE, Net

from sparsekit_fl.flower import BanditRatios, SubmodelStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    strategy = SubmodelStrategy(strategy, Net(), EXAMPLE, ratio=BanditRatios(rounds, low=0.25), learned=True)
    config = ConfigRecord({"lr": context.run_config["learning-rate"]})
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), train_config=config, num_rounds=rounds)
    print(result.evaluate_metrics_clientapp[rounds])
