"""The `isthmus` command. Each verb's module is imported when the verb is called."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from engine.flags import ConfigError, parse_flags

_ADD_EXAMPLES = """\
examples:
  isthmus add decode                                     on this host, or on any that Ray finds
  isthmus add decode --node 10.0.0.12 --max-num-seqs 32  on a host of the Ray cluster, one setting changed
  isthmus add prefill group.yaml                         settings from a file, such as `numa_node: 1`

`isthmus status` shows it; `isthmus drain` takes it out again.
"""

_EXAMPLES = """\
examples:
  isthmus {name}                                            the tiny model, on port 8000
  isthmus {name} --model ./checkpoint --port 9000           another model, the rest as for the tiny one
  isthmus {name} cluster.yaml --decode-max-num-seqs 32      a file of your own, one setting changed for one role
  ISTHMUS_MAX_NUM_SEQS=32 isthmus {name} cluster.yaml

Every setting can come from a flag, from ISTHMUS_<NAME> in the environment, or from the YAML file; the first of these
that is given wins. `isthmus plan` shows which one did.
"""

VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}


def verb(name: str, summary: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Register a function of the remaining arguments as `isthmus <name>`."""

    def register(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        VERBS[name] = (summary, function)
        return function

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code: 0 well, 1 failed, 2 wrong usage or configuration."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"isthmus {metadata.version('isthmus')}")
        return 0
    name, rest = words[0], words[1:]
    if name not in VERBS:
        print(f"isthmus: no such command: {name}\n\n{_overview()}", file=sys.stderr)
        return 2
    try:
        return VERBS[name][1](rest)
    except ConfigError as error:
        print(f"isthmus {name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@verb("up", "start a cluster from a YAML file and watch it until Ctrl-C")
def _up(argv: list[str]) -> int:
    from deploy.config import add_cluster_flags, load_cluster_config, unknown_variables

    parser = _parser("up", "Start Ray, the worker groups and the router; show them getting ready; stop with Ctrl-C.")
    add_cluster_flags(parser)
    for line in unknown_variables(os.environ):
        print(f"isthmus up: {line}", file=sys.stderr)
    config = load_cluster_config(parse_flags(parser, argv), os.environ)
    from deploy.cluster import up
    from deploy.progress import Progress

    return up(config, environ=os.environ, progress=Progress())


@verb("status", "show the running clusters: workers, states, pids, NUMA, lanes, load")
def _status(argv: list[str]) -> int:
    from deploy.status import status

    parser = _parser(
        "status",
        "Show the running clusters that this user has started with `isthmus up`. Roles started by hand are not listed: "
        "ask their router's /topology.",
    )
    parser.add_argument("--port", type=int, help="only the cluster whose router listens there")
    parser.add_argument("--json", action="store_true", help="print the router's /topology as it is")
    args = parse_flags(parser, argv)
    return status(port=args.port, as_json=args.json, environ=os.environ)


@verb("down", "stop a running cluster and wait until nothing of it is left")
def _down(argv: list[str]) -> int:
    from deploy.status import down

    parser = _parser("down", "Stop a cluster: drain it, and kill it if it has not ended in time.")
    parser.add_argument("--port", type=int, help="the cluster whose router listens there; needed if several run")
    parser.add_argument("--all", action="store_true", help="every cluster of this user")
    parser.add_argument("--timeout", type=float, default=90.0, metavar="SECONDS", help="until it is killed (90)")
    args = parse_flags(parser, argv)
    return down(port=args.port, every=args.all, timeout_s=args.timeout, environ=os.environ)


@verb("add", "add a worker group to a running cluster: isthmus add decode")
def _add(argv: list[str]) -> int:
    from deploy.config import PER_GROUP
    from deploy.scale import add, read_settings
    from engine.flags import add_engine_flags

    parser = _parser(
        "add",
        "Start one more prefill or decode group and give it requests as soon as it is ready. It is like the last group "
        "of its role in the cluster's configuration, but for the settings given here.",
    )
    parser.add_argument("role", choices=["prefill", "decode"], help="what the group does")
    parser.add_argument("config", nargs="?", metavar="YAML", help="file with settings of this group, key: value")
    parser.add_argument("--port", type=int, help="the cluster whose router listens there; needed if several run")
    parser.add_argument("--no-wait", action="store_true", help="return when its leader listens, not when it is ready")
    parser.add_argument("--node", metavar="ADDRESS", help="host of the Ray cluster to run on; default: any that fits")
    add_engine_flags(parser, without=PER_GROUP)
    args = parse_flags(parser, argv)
    own = ("role", "config", "port", "no_wait")
    flags = {name: value for name, value in vars(args).items() if name not in own and value is not None}
    settings = {**(read_settings(args.config) if args.config else {}), **flags}
    return add(args.role, settings, port=args.port, waits=not args.no_wait, environ=os.environ)


@verb("drain", "let a worker group finish what it has and leave: isthmus drain decode-1")
def _drain(argv: list[str]) -> int:
    from deploy.scale import drain

    parser = _parser(
        "drain",
        "Give a worker group nothing new, wait until nothing depends on it any more, and end it; what it had in Ray is "
        "free again. No request is lost: decode finishes its answers, prefill what it has begun to push.",
    )
    parser.add_argument("worker", metavar="WORKER", help="name of the group, as in `isthmus status`: decode-1")
    parser.add_argument("--port", type=int, help="the cluster whose router listens there; needed if several run")
    parser.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="then resume what still runs there at other groups, with the same tokens (default 0: wait for its end)",
    )
    parser.add_argument("--no-wait", action="store_true", help="return at once, not when it has left")
    args = parse_flags(parser, argv)
    if not 0 <= args.timeout < math.inf:
        raise ConfigError(f"--timeout {args.timeout:g}: wanted seconds, 0 or more; 0 waits without limit")
    return drain(args.worker, port=args.port, timeout_s=args.timeout, waits=not args.no_wait, environ=os.environ)


@verb("plan", "print what `up` would run where, and the memory arithmetic, without starting anything")
def _plan(argv: list[str]) -> int:
    from deploy.config import add_cluster_flags, load_cluster_config
    from deploy.plan_table import print_plan

    parser = _parser(
        "plan",
        "Print placement, memory plan and what it allows, and where each setting came from. Needs neither GPUs nor the "
        "checkpoint of a published model: --gpu-memory-gib says what a GPU has. Exit code 2, with the nearest "
        "configurations that fit, if it does not fit.",
    )
    add_cluster_flags(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    args = parse_flags(parser, argv)
    print_plan(load_cluster_config(args, os.environ), as_json=args.json)
    return 0


@verb("check", "could a cluster start here, and run well? driver, GPUs, NUMA, ports, memory, limits, model; what to do")
def _check(argv: list[str]) -> int:
    from deploy.check import check
    from deploy.config import add_cluster_flags, load_cluster_config

    parser = _parser(
        "check",
        "Look at this host for what a cluster needs, and say of each thing what was found and what to do: versions, "
        "ports, model folder, memory plan, NUMA placement, host memory, limits, lanes, and with device: cuda driver, "
        "architecture, memory and peer-to-peer of the GPUs. Starts nothing. Exit code 1 if there is a problem, 0 with "
        "warnings only. What is a problem to `up` is one here, by the same code.",
    )
    add_cluster_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parse_flags(parser, argv)
    return check(load_cluster_config(args, os.environ), environ=os.environ, as_json=args.json)


@verb(
    "model", "`model check DIR`: what a checkpoint holds and whether it can be served; `model synthesize`: one to test"
)
def _model(argv: list[str]) -> int:
    if argv[:1] == ["check"]:
        from deploy.model_check import main as run_check

        return run_check(_with_model_folder(argv[1:]))
    if argv[:1] == ["synthesize"]:
        from deploy.model_synthesize import main as run_synthesize

        return run_synthesize(argv[1:])
    return _usage("model", "check DIR [...] | synthesize OUT --like v4-flash [...]      (each with --help)", argv)


@verb("kernels", "`kernels check`: compile every GPU kernel for its targets and check it; needs no GPU")
def _kernels(argv: list[str]) -> int:
    if argv[:1] != ["check"]:
        return _usage("kernels", "check [--arch sm_120|sm_90] [--kernel NAME] [--json FILE] [--no-cache]", argv)
    from kernels.check import main as run

    return run(argv[1:], prog="isthmus kernels check")


@verb(
    "bench",
    "`bench serve`: load for any server; `bench compare`: two reports; `bench step`, `bench prefill`: decode steps and "
    "prompts of one rank; `bench weights`: loading; `bench router`, `guides`, `kernels`, `transfer`: parts",
)
def _bench(argv: list[str]) -> int:
    if argv[:1] == ["serve"]:
        from bench.serve import main as run_serve

        return run_serve(argv[1:], prog="isthmus bench serve")
    if argv[:1] == ["compare"]:
        from bench.compare import main as run_compare

        return run_compare(argv[1:], prog="isthmus bench compare")
    if argv[:1] == ["step"]:
        from bench.step import main as run_step

        return run_step(_with_model_folder(argv[1:]), prog="isthmus bench step")
    if argv[:1] == ["prefill"]:
        from bench.prefill import main as run_prefill

        return run_prefill(_with_model_folder(argv[1:]), prog="isthmus bench prefill")
    if argv[:1] == ["weights"]:
        from bench.weights import main as run_weights

        return run_weights(_with_model_folder(argv[1:]), prog="isthmus bench weights")
    if argv[:1] == ["kernels"]:
        from kernels.bench import main as run_kernels

        return run_kernels(argv[1:], prog="isthmus bench kernels")
    if argv[:1] == ["transfer"]:
        from kv_transfer.bench import main as run_transfer

        return run_transfer(argv[1:], prog="isthmus bench transfer")
    if argv[:1] == ["router"]:
        from router.bench import main as run_router

        model = [] if any(word.split("=")[0] == "--model" for word in argv) else ["--model", "dsv4-tiny"]
        return run_router(_with_model_folder([*argv[1:], *model]), prog="isthmus bench router")
    if argv[:1] == ["guides"]:
        from router.guided_bench import main as run_guides

        model = [] if any(word.split("=")[0] == "--model" for word in argv) else ["--model", "dsv4-tiny"]
        return run_guides(_with_model_folder([*argv[1:], *model]), prog="isthmus bench guides")
    return _usage(
        "bench",
        "serve --url URL [...] | compare A B | step --model FOLDER [...] | prefill --model FOLDER [...] | "
        "weights --model FOLDER [...] | "
        "router [...] | guides [...] | kernels --group GROUP [...] | transfer [...]      (each with --help)",
        argv,
    )


@verb("profile", "where the time of a decode step goes, kernel by kernel: of a running worker, or of an engine here")
def _profile(argv: list[str]) -> int:
    from bench.profile import main as run

    return run(_with_model_folder(argv))


@verb("router", "run a router by hand, = python -m router")
def _router(argv: list[str]) -> int:
    from router.__main__ import main as run

    return run(_with_model_folder(argv))


@verb("prefill-worker", "run a prefill worker by hand (leader and ranks), = python -m prefill_worker")
def _prefill_worker(argv: list[str]) -> int:
    from prefill_worker.__main__ import main as run

    return run(_with_model_folder(argv))


@verb("decode-worker", "run a decode worker by hand (leader and ranks), = python -m decode_worker")
def _decode_worker(argv: list[str]) -> int:
    from decode_worker.__main__ import main as run

    return run(_with_model_folder(argv))


def _usage(name: str, rest: str, argv: list[str]) -> int:
    """Print how a verb with one sub-command is called; asking for that is no error."""
    asked = argv[:1] in (["-h"], ["--help"])
    print(f"usage: isthmus {name} {rest}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _with_model_folder(argv: list[str]) -> list[str]:
    """Replace the name dsv4-tiny by its folder, written if need be: workers know folders only."""
    from deploy.tiny_model import NAME, ensure_tiny_model

    return [str(ensure_tiny_model(os.environ)) if word == NAME else word for word in argv]


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    epilog = _EXAMPLES.format(name=name) if name in ("up", "plan", "check") else None
    epilog = _ADD_EXAMPLES if name == "add" else epilog
    return argparse.ArgumentParser(
        prog=f"isthmus {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter,
        allow_abbrev=False,
    )


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {summary}" for name, (summary, _) in VERBS.items()]
    return "\n".join(["usage: isthmus COMMAND [...]      (COMMAND --help says more)", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
