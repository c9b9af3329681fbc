"""A planner process of a test's run, with made-up costs. What goes wrong on purpose is in `FOLDER/break_planner.py`.

Run by the planner service as `planner_script.py FOLDER FD`.
"""

import sys
from pathlib import Path

from pipeweaver.costs import FlatCosts
from pipeweaver.runtime import planner_process

folder = Path(sys.argv.pop(1))
planner_process.unpack_costs = lambda packed, graph: FlatCosts(
    layers={module.name: len(module.layers) for module in graph.modules}
)
if (folder / "break_planner.py").exists():
    exec((folder / "break_planner.py").read_text(), {"planner_process": planner_process, "folder": folder})
planner_process.main()
