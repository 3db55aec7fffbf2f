"""The server of a Flower app, as Flower's quickstart for PyTorch has it."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    rounds = context.run_config["num-server-rounds"]
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0)
    config = ConfigRecord({"lr": context.run_config["learning-rate"]})
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(Net().state_dict()), train_config=config, num_rounds=rounds)
    print(result.evaluate_metrics_clientapp[rounds])
