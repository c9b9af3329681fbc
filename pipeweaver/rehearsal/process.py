"""A worker process of a rehearsal: `python -m pipeweaver.rehearsal.process FOLDER`, started by `rehearse`."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeweaver.runtime.process import run_worker, tie_to_parent


def main(folder: Path) -> None:
    import torch.distributed as dist

    from pipeweaver.cluster import Workers
    from pipeweaver.rehearsal.links import marks_for
    from pipeweaver.rehearsal.play import play
    from pipeweaver.rehearsal.script import read_script, write_report
    from pipeweaver.runtime.join import join
    from pipeweaver.runtime.transport import ProcessTransport, lost_workers_told
    from pipeweaver.runtime.watchdog import Watchdog

    script = read_script(folder)
    workers = Workers(pipeline=script.num_workers, replicas=script.num_replicas, pin=False)
    with lost_workers_told():
        membership = join(workers, "cpu", patience_s=script.watchdog_s)
        transport = ProcessTransport(membership.workers, membership.device)
        transport.barrier()
        membership.company.close()
        report = play(script, transport, marks_for(script.steps, folder / "marks"), Watchdog(script.watchdog_s))
        write_report(folder, membership.rank, report)
        transport.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    tie_to_parent()
    run_worker(lambda: main(Path(sys.argv[1])))
