"""A worker of a test's run: trains a small job with made-up costs, and leaves its parameters in the folder.

Run by `launch` or torchrun as `worker_process.py FOLDER KEY=VALUE …`. What goes wrong on purpose is in `FOLDER/break.py`.
"""

import os
import sys
from functools import partial
from pathlib import Path

from pipeweaver.runtime.process import run_worker, tie_to_parent

tie_to_parent()


def main() -> None:
    import msgspec
    import torch

    from pipeweaver import config
    from pipeweaver.costs import FlatCosts
    from pipeweaver.runtime import orders, train

    folder = Path(sys.argv[1])
    workers = []

    class KeptWorker(train.Worker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            workers.append(self)

    def flat_costs(graph, *_, **__):
        return FlatCosts(layers={module.name: len(module.layers) for module in graph.modules})

    def write(report):
        name, line = "evaluations.jsonl", report
        if isinstance(report, train.StepReport):
            name, line = "metrics.jsonl", report.metrics
        with (folder / name).open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    train.Worker, train.calibrated_costs = KeptWorker, flat_costs
    orders.pack_costs = lambda costs: b""
    command = [sys.executable, str(Path(__file__).with_name("planner_script.py")), str(folder)]
    orders.Service = partial(orders.Service, command=command)
    if (folder / "break.py").exists():
        exec((folder / "break.py").read_text(), {"train": train, "folder": folder})
    job = config.load(folder / "job.toml", [f"run.output={folder}/out", *sys.argv[2:]])
    result = train.train(job, [write])
    assert (result is None) == (os.environ["RANK"] != "0")
    (worker,) = workers
    address = worker.transport.address
    torch.save(
        {name: parameter.detach() for name, parameter in worker.parameters.items()},
        folder / f"parameters-{address.replica}-{address.worker}.pt",
    )


run_worker(main)
