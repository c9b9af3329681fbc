"""A worker runs its list of actions of a plan: the runtime's inner loop.

    worker = Worker(graph, modules=..., parameters=..., transport=..., load=..., optimizer=OptimizerConfig())
    result = worker.run(plan, learning_rate=1e-3)
    result.losses["main/language"], result.gradient_norm, result.spans[i]

The same code runs on every transport. Nothing about shapes or order is decided here: the plan says it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeweaver.model.graph import ModelGraph
from pipeweaver.runtime.execution import Execution, Loader
from pipeweaver.runtime.heap import reserve_memory
from pipeweaver.runtime.offload import Copies
from pipeweaver.runtime.optimizer import OptimizerConfig, adamw
from pipeweaver.runtime.process import RunError
from pipeweaver.runtime.reduce import Bucket, make_buckets
from pipeweaver.runtime.stage import BuiltChunk, build_chunk
from pipeweaver.runtime.transport import Transport
from pipeweaver.runtime.watchdog import Watchdog
from pipeweaver.schedule.ir import Action, Chunk, Norm, ParameterGroup, Plan, Post, Reduce, Span, Wait

RESERVE = 0.25
"""What the heap has beyond a plan's peak: other plans need more, and pieces between what is in use are lost."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a worker knows after a plan. `losses` and `gradient_norm` are of the whole batch, equal on all workers.

    `losses` by "task/module" are sums over units divided by their normaliser, without the loss's weight;
    `gradient_norm` is the one before clipping, None for a forward-only plan. `metrics` are what the layers on
    this worker reported, by "task/module/name" as (total, count). `spans[i]` belongs to the worker's i-th action, nanoseconds from
    `start_ns` of `time.perf_counter_ns`; `posted_ns` and `finished_ns`, likewise, to transfers by number: when
    they were posted here and when the wait for them was over. `peak_bytes` is measured on GPUs, else None.
    """

    losses: dict[str, float]
    gradient_norm: float | None
    metrics: dict[str, tuple[float, int]]
    start_ns: int
    spans: tuple[Span, ...]
    posted_ns: dict[int, int]
    finished_ns: dict[int, int]
    peak_bytes: int | None


class WorkerError(RunError):
    """An action failed: says on which worker, which action, with which peer. Caused by another error where layers ran."""


class Worker:
    """One worker of one replica: the one that its transport is an end for.

    `modules` are its layers by name, `parameters` their parameters by canonical name, tied ones once
    (`model.build`). `seed` is the run's, for the randomness of items. Without `optimizer` it only evaluates.
    `loads_ahead` parts are loaded ahead of their actions, in a thread: by default 2 on GPUs, none on CPUs.
    A rehearsal has its own `build`, for chunks that compute nothing, and waits in `after`, called after every action.
    """

    def __init__(
        self,
        graph: ModelGraph,
        *,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        transport: Transport,
        load: Loader,
        optimizer: OptimizerConfig | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        watchdog: Watchdog | None = None,
        loads_ahead: int | None = None,
        build: Callable[[ModelGraph, Chunk, Mapping[str, nn.Module]], BuiltChunk] = build_chunk,
        after: Callable[[Action], None] | None = None,
    ) -> None:
        self.graph = graph
        self.transport = transport
        self.load = load
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.dtype = dtype
        self.watchdog = watchdog
        self.loading = ThreadPoolExecutor(1, thread_name_prefix="loading")
        self.loads_ahead = (2 if self.device.type == "cuda" else 0) if loads_ahead is None else loads_ahead
        self.copies = Copies(self.device)
        self.build = build
        self.after = after
        self.config = optimizer
        self._num_replicas = 0
        self.waiting: dict[str, Tensor] = {}
        """What no task of the current set trains and this worker keeps for later, packed (`relocate.py`)."""
        self.hold(modules, parameters, {})

    def run(self, plan: Plan, *, learning_rate: float | None = None) -> StepResult:
        """Run this worker's actions of a plan to the end. `learning_rate` takes the place of the configured one.

        Afterwards `buckets` hold the step's gradients, reduced and clipped, until the next run. Raises
        WorkerError, naming the action, where torch, a layer or the transport fails; ValueError for what layers or
        data do wrong against their contract. After an error the worker cannot run another plan.
        """
        assert plan.replica == self.transport.address.replica, "the plan is for another replica"
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        actions = plan.actions[self.transport.address.worker]
        predicted_s = plan.prediction.step_ns / 1e9 if plan.prediction else 0.0
        execution = Execution(self, plan, learning_rate)
        clock = execution.clock
        try:
            self._watch(execution, predicted_s)
            self.transport.prepare(plan)
            if not plan.forward_only:
                self._prepare_gradients(plan)
            for index, action in enumerate(actions):
                execution.at = index
                self._watch(execution, predicted_s)
                execution.perform(action)
                if self.after is not None:
                    self.after(action)
                clock.mark()
            execution.at = len(actions)
            self._watch(execution, predicted_s)
            execution.finish()
            times = clock.times()
        except ValueError:
            raise
        except Exception as error:  # layers of the user's own raise whatever comes to them
            # What a backend says of a lost peer is about no line of code.
            between_workers = isinstance(error, RuntimeError) and all(
                isinstance(a, Post | Wait | Reduce | Norm) for a in actions[execution.at : execution.at + 1]
            )
            words = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            raise WorkerError(f"{execution.describe()}: {words}") from None if between_workers else error
        finally:
            if self.watchdog is not None:
                self.watchdog.stop()
        spans = tuple(Span(times[i] - times[0], times[i + 1] - times[0]) for i in range(len(actions)))
        ends = list(zip(actions, spans, strict=True))
        return StepResult(
            losses=execution.losses,
            gradient_norm=execution.gradient_norm,
            metrics=execution.metrics(),
            start_ns=times[0],
            spans=spans,
            posted_ns={action.transfer: span.end_ns for action, span in ends if isinstance(action, Post)},
            finished_ns={action.transfer: span.end_ns for action, span in ends if isinstance(action, Wait)},
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )

    def hold(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        states: Mapping[str, dict[str, Tensor]],
    ) -> None:
        """Hold these layers from now on, with the optimizer's states of their parameters by name; absent ones are new."""
        self.modules, self.parameters = modules, parameters
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self.optimizer = adamw(self.config, trained) if self.config is not None and trained else None
        if self.optimizer is not None:
            self.optimizer.state.update({trained[name]: dict(state) for name, state in states.items() if state})
        self.buckets: dict[int, Bucket] = {}
        self._groups: tuple[ParameterGroup, ...] | None = None
        self._chunks: dict[Chunk, BuiltChunk] = {}

    def reserve(self, plan: Plan) -> None:
        """Have the memory that plans like this one need before the first of them runs. On GPUs torch keeps its own."""
        if self.device.type == "cpu" and plan.prediction is not None:
            worker = self.transport.address.worker
            needed = plan.prediction.peak_bytes[worker] - plan.static_bytes[worker]
            reserve_memory(int(needed * (1 + RESERVE)))

    def built(self, chunk: Chunk) -> BuiltChunk:
        """A chunk of this worker, ready to run."""
        if chunk not in self._chunks:
            self._chunks[chunk] = self.build(self.graph, chunk, self.modules)
        return self._chunks[chunk]

    def _watch(self, execution: Execution, predicted_s: float) -> None:
        if self.watchdog is not None:
            self.watchdog.start(execution.describe, predicted_s=predicted_s)

    def _prepare_gradients(self, plan: Plan) -> None:
        """Gradients start at zero; parameters in no group of the plan have none and will not be stepped."""
        if plan.groups == self._groups and plan.num_replicas == self._num_replicas:
            for bucket in self.buckets.values():
                bucket.flat.zero_()
            return
        self._groups, self._num_replicas = plan.groups, plan.num_replicas
        worker = self.transport.address.worker
        self.buckets = make_buckets(plan.groups, self.parameters, worker, plan.num_replicas)
