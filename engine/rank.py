"""A rank process: one device, its model, its cache pools, its transport agent.

It attaches to its leader's rings, binds itself to its NUMA node before anything is loaded, then obeys: step plans on
this thread, transfers (prefill) or arrivals (decode) on the thread that owns the transport. When the leader ends, the
rank ends: nobody else would free what it holds.

    python -m engine.rank RUN_DIR RANK        (started by the leader; run_dir holds leader.json and config.json)
"""

from __future__ import annotations

import collections
import logging
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine import numa_binding
from engine import plan as messages
from engine.config import EngineConfig
from engine.leader import REFUSED, LeaderAddress
from engine.logits_log import LogitsLog
from engine.memory_plan import plan_memory
from engine.model.config import ConfigError
from engine.model.stored_forms import WeightsError
from engine.ring import PeerGone, Waiter, open_rank_end
from engine.served_model import served_model
from kv_transfer.landing import Endpoint, encode
from kv_transfer.transports import make_transport

if TYPE_CHECKING:
    from engine.arrivals import ArrivalThread
    from engine.memory_gauge import MemoryGauge
    from engine.parallel import Rank
    from engine.runner import ModelRunner, Ticket
    from engine.step_profiler import RankProfile
    from engine.transfers import TransferThread
    from kv_transfer.transport import KvTransport

log = logging.getLogger(__name__)

REFUSALS = (ConfigError, WeightsError)
_ATTACH_TIMEOUT_S = 60.0
_PATIENCE_S = 3600.0
_PULSE_S = 0.5
_STEPS_LAUNCHED = 2
_HUNG_AFTER_S = 600.0
"""Of a rank of several: longer than any step, and than what an exchange on the host waits (parallel.STEP_TIMEOUT_S)."""
_NAP_S = 1e-4
"""How often a step alone under way is looked at: who blocks for it can't launch the next behind it."""


def run_rank(config: EngineConfig, run_dir: Path, rank: int) -> None:
    """Serve until the leader says shutdown or ends. Raises what made it fail, after telling the leader.

    REFUSALS among it: these say all there is to say, without where they were raised.
    """
    process = RankProcess(config, run_dir, rank)
    try:
        process.run()
    except PeerGone as e:
        log.info("rank %d ends: %s", rank, e)
    except REFUSALS as e:
        process.send(messages.RankFailed(rank=rank, reason=str(e), is_refusal=True))
        raise
    except Exception as e:
        follows = type(e).__name__ == "ExchangeFailed"  # its module would bring torch, which may be what is missing
        process.send(messages.RankFailed(rank=rank, reason=f"{type(e).__name__}: {e}", follows=follows))
        raise


class RankProcess:
    def __init__(self, config: EngineConfig, run_dir: Path, rank: int) -> None:
        self._config, self._rank = config, rank
        address = _find_leader(run_dir)
        self._generation = address.generation
        self._channel, bell = open_rank_end(address.rings, rank)
        self._waiter = Waiter(bell)
        self._waiter.watch(address.pid)
        self._leader_pidfd = os.pidfd_open(address.pid)
        self._logits_log: LogitsLog | None = None
        self._is_done = False
        self._runner: ModelRunner
        self._launched: collections.deque[tuple[int, Ticket]] = collections.deque()  # plans' numbers, oldest first
        self._transfers: TransferThread | None = None
        self._arrivals: ArrivalThread | None = None
        self._run_dir = run_dir
        self._profile: RankProfile | None = None
        self._group: Rank | None = None
        self._busy_since: float | None = None  # of the oldest plan that is not answered yet

    def send(self, message: messages.RankMessage) -> None:
        self._channel.send(messages.encode(message))

    def run(self) -> None:
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()
        self._load()
        while not self._is_done:
            received = self._channel.receive()
            for data in received:
                self._obey(messages.decode_leader_message(data))
            if received:
                continue  # the next plan may be there: it is launched before the result of this one is waited for
            if len(self._launched) == _STEPS_LAUNCHED:
                self._collect()
            elif self._launched:
                self._waiter.nap(_NAP_S)
                self._collect_ready()
            elif self._waiter.wait(_PATIENCE_S):
                raise PeerGone("the leader has ended")
        if self._transfers is not None:
            self._transfers.stop()
        if self._arrivals is not None:
            self._arrivals.stop()
        if self._group is not None:
            self._group.close()

    def _beat(self) -> None:
        """Show the leader that this process runs, and end at once when the leader has: a long step must not look like a
        stopped process, and writes of a group without a leader must not go on behind everybody's back. A rank whose GPU
        waits for others, who do not come, is ended here: nothing else would.
        """
        watch = select.poll()
        watch.register(self._leader_pidfd, select.POLLIN)
        while not watch.poll(_PULSE_S * 1000):
            self._channel.beat()
            since = self._busy_since
            if since is not None and time.monotonic() - since > _HUNG_AFTER_S and self._config.ranks > 1:
                reason = f"a step has taken more than {_HUNG_AFTER_S:.0f} s: the ranks of the group are out of step"
                log.error("rank %d: %s", self._rank, reason)
                self.send(messages.RankFailed(rank=self._rank, reason=reason))
                os._exit(1)
        if not self._is_done:
            os._exit(1)

    # ------------------------------------------------------------ start

    def _load(self) -> None:
        config = self._config
        binding = numa_binding.bind(node=config.numa_node, cpus=config.cpus)
        self._progress("loading", "importing torch")
        import torch

        from engine.parallel import join
        from engine.runner import DTYPES, ModelRunner
        from engine.warm_up import warm_up

        torch.set_num_threads(config.threads)
        plan = plan_memory(config, served_model(config).config)
        if config.device == "cuda" and config.ranks > 1:
            _take_gpu(self._rank, torch.cuda.device_count())
            torch.cuda.set_device(self._rank)
        self._group = group = join(
            self._run_dir,
            rank=self._rank,
            count=config.ranks,
            generation=self._generation,
            device=config.device,
            dtype=DTYPES[config.dtype],
            all_reduce=config.all_reduce,
            progress=lambda text: self._progress("loading", text),
        )
        self._runner = ModelRunner(
            config, num_blocks=plan.num_blocks, num_slots=plan.num_slots, rank=self._rank, group=group
        )
        gauge = self._gauge()
        self._runner.load(lambda text: self._progress("loading", text))
        if gauge is not None:
            gauge.loaded(state_bytes=self._runner.state_bytes)
            self._runner.capture(lambda text: self._progress("capturing", text))
            gauge.captured()
            if config.role == "prefill":
                warm_up(self._runner, lambda text: self._progress("capturing", text))
        if config.logits_log:
            self._logits_log = LogitsLog(Path(config.logits_log), f"{config.worker_id}-{self._rank}")
            self._runner.on_logits = self._logits_log.on_logits
        self._progress(
            "linking", f"registering {self._runner.cache.num_bytes / 2**20:,.1f} MiB with {config.transport}"
        )
        self._show_places(binding)
        endpoint = self._open_transport()
        memory = None if gauge is None else gauge.measured(self._runner.graph_nodes)
        if memory is not None:
            log.info("rank %d: memory\n%s", self._rank, plan.corrected(memory).table())
        self.send(
            messages.RankReady(
                rank=self._rank,
                pid=os.getpid(),
                device=config.device,
                numa=binding.report(),
                transport=config.transport,
                endpoint=encode(endpoint),
                model_fingerprint=self._runner.model_fingerprint,
                memory=memory,
                exchange=self._runner.exchange_info(group.exchange),
            )
        )

    def _show_places(self, binding: numa_binding.Binding) -> None:
        """Have the kernel asked where pools in host memory lie, while nobody else knows of them; or name the GPU."""
        if self._runner.device.type == "cuda":
            binding.see_gpu(numa_binding.gpu_address(self._runner.device.index or 0))
            return
        for pool in self._runner.cache.pool_addresses():
            binding.see_memory(pool.name, pool.base, pool.unit_bytes * pool.num_units)

    def _gauge(self) -> MemoryGauge | None:
        """Return what measures this rank's memory while it starts, with its pools allocated; None on the CPU."""
        device = self._runner.device
        if device.type != "cuda":
            return None
        from engine.memory_gauge import MemoryGauge, read_cuda

        return MemoryGauge(lambda: read_cuda(device))

    def _open_transport(self) -> Endpoint:
        """Start the thread that owns the transport."""
        config, cache = self._config, self._runner.cache
        device = self._runner.device

        def make() -> KvTransport:
            return make_transport(
                config.transport,
                config.worker_id,
                memory="VRAM" if device.type == "cuda" else "DRAM",
                device=device.index or 0,
                host=config.host,
            )

        def on_failed(reason: str) -> None:
            self.send(messages.RankFailed(rank=self._rank, reason=reason))

        if config.role == "prefill":
            from engine.transfers import Transfers, TransferThread

            self._transfers = TransferThread(
                lambda: Transfers(
                    make(),
                    cache,
                    rank=self._rank,
                    num_ranks=config.ranks,
                    generation=self._generation,
                    timeout_s=config.transfer_timeout_s,
                    allow_tcp=config.allow_tcp,
                    emit=self.send,
                ),
                on_failed=on_failed,
            )
            return self._transfers.start()
        from engine.arrivals import ArrivalThread

        self._arrivals = ArrivalThread(
            make,
            cache.pool_addresses(),
            rank=self._rank,
            generation=self._generation,
            emit=self.send,
            on_failed=on_failed,
        )
        return self._arrivals.start()

    def _progress(self, state: str, detail: str) -> None:
        self.send(messages.RankProgress(rank=self._rank, state=state, detail=detail))  # type: ignore[arg-type]

    # ------------------------------------------------------------ work

    def _obey(self, message: messages.LeaderMessage) -> None:
        match message:
            case messages.StepPlan():
                self._busy_since = self._busy_since or time.monotonic()
                if len(self._launched) == _STEPS_LAUNCHED:
                    self._collect()
                if self._logits_log is not None:
                    self._logits_log.on_plan(message)
                if self._profile is not None:
                    self._profile.on_plan(message)
                self._launched.append((message.number, self._runner.launch(message)))
                self._collect_ready()
            case messages.Profile():
                self._start_profile(message)
            case messages.PumpHint():
                if self._arrivals is not None:
                    self._arrivals.hint(message.open_landings)
            case messages.Shutdown():
                self._is_done = True
            case _:
                assert self._transfers is not None, f"a decode rank was told {type(message).__name__}"
                self._transfers.order(message)

    def _collect_ready(self) -> None:
        """Answer every step that has ended."""
        while self._launched and self._launched[0][1].is_ready:
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest step launched, and answer it."""
        number, ticket = self._launched.popleft()
        tokens, failed, logprobs = self._runner.collect(ticket)
        self._busy_since = time.monotonic() if self._launched else None
        if self._logits_log is not None:
            self._logits_log.on_tokens(tokens)
        self.send(
            messages.StepResult(
                rank=self._rank,
                number=number,
                tokens=tokens,
                failed=failed,
                logprobs=list(logprobs) if self._rank == 0 else [],
            )
        )
        if self._profile is not None and (done := self._profile.on_result(number)) is not None:
            self._profile = None
            self.send(done)

    def _start_profile(self, request: messages.Profile) -> None:
        """Let a profile begin with the next step, in place of one that nobody waits for any more."""
        if self._rank != 0:
            return
        from engine.step_profiler import RankProfile

        if self._profile is not None:
            self._profile.finish()
            self._profile = None
        if request.steps:
            self._profile = RankProfile(self._runner, request, self._run_dir / f"profile-{request.number}.json")


def _take_gpu(rank: int, visible: int) -> None:
    """Raise ConfigError unless there is a GPU for every rank up to this one."""
    if rank >= visible:
        raise ConfigError(
            f"rank {rank} takes the GPU of its number, and {visible} are visible: make {rank + 1} visible "
            "(CUDA_VISIBLE_DEVICES), or lower ranks"
        )


def _find_leader(run_dir: Path) -> LeaderAddress:
    """Wait for a leader.json whose leader is alive."""
    path, deadline = run_dir / "leader.json", time.monotonic() + _ATTACH_TIMEOUT_S
    while True:
        try:
            address = msgspec.json.decode(path.read_bytes(), type=LeaderAddress)
            os.kill(address.pid, 0)
            return address
        except (FileNotFoundError, ProcessLookupError):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no leader announced itself in {path} within {_ATTACH_TIMEOUT_S:.0f} s; did it fail to start?"
                ) from None
            time.sleep(0.02)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    folder = Path(sys.argv[1])
    try:
        run_rank(
            msgspec.json.decode((folder / "config.json").read_bytes(), type=EngineConfig), folder, int(sys.argv[2])
        )
    except REFUSALS:
        sys.exit(REFUSED)  # the leader has said why
