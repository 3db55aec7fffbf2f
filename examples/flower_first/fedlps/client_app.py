"""The client of a Flower app, which learns its own submodel: FedLPS."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import EXAMPLE, Net, load_data
from task import test as test_fn
from task import train as train_fn

from sparsekit_fl.flower import load_submodel, train_submodel

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    """Train the model on local data."""
    trainloader, _ = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    capability = context.node_config.get("capability", 1.0)
    with train_submodel(msg, context, Net(), EXAMPLE, capability=capability) as submodel:
        model, epochs = submodel.model, context.run_config["local-epochs"]
        loss, accuracy = train_fn(model, trainloader, epochs, msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "train_acc": accuracy, "num-examples": len(trainloader.dataset)}
    return submodel.reply(metrics)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Score the model on local data."""
    model = load_submodel(msg, context, Net(), EXAMPLE)
    _, testloader = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    metrics = {"eval_acc": test_fn(model, testloader), "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
