"""Flags, environment and YAML of a worker group, merged into one EngineConfig.

Precedence: flag > ISTHMUS_<FIELD> in the environment > YAML > default. One table names every field once: its flags
(with the spellings that vLLM and SGLang users know), its help and its bounds. `deploy` builds clusters from the same
table, so that a name works everywhere or nowhere. Imports no torch.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec

from engine.config import EngineConfig
from engine.model.shard import Shard
from engine.numa import parse_cpu_list
from router.protocol import WorkerRole

ENVIRONMENT_PREFIX = "ISTHMUS_"
_CEILING = 1 << 53


class ConfigError(ValueError):
    """A setting that can't be used. The text names field, value, where it came from, and the remedy."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of EngineConfig as a user sees it. low, high: inclusive bounds of a number."""

    name: str
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    low: float = 0
    high: float = _CEILING

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--" + self.name.replace("_", "-"), *self.aliases)


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of settings, with the name that errors and `isthmus plan` give it."""

    origin: str
    values: Mapping[str, object]


_MODEL, _MEMORY, _BATCH, _PLACE, _NET = "model", "cache and memory", "batching", "placement", "network and limits"

FIELDS = (
    Field("model", _MODEL, "folder with config.json and safetensors files", ("--model-path",)),
    Field("served_model_name", _MODEL, "name in the API; default: the folder's name"),
    Field("load_format", _MODEL, "auto: read the folder's weights; synthetic: random ones of the same shapes"),
    Field(
        "weight_cache",
        _MODEL,
        "folder to keep packed weights in: the first start writes, later ones read just these; docs/checkpoints.md",
    ),
    Field("simulate_rank", _MODEL, "0/4: be rank 0 of a group of 4 without the others (synthetic weights only)"),
    Field("num_layers", _MODEL, "the first layers only, 0: all (synthetic weights only)", (), 0, 1024),
    Field("dtype", _MODEL, "arithmetic and weights: float32 or bfloat16"),
    Field(
        "kv_cache_dtype", _MEMORY, "cache rows: fp32, bf16 or packed (FP8, bf16 rope, scales: 584 bytes at head 512)"
    ),
    Field("index_cache_dtype", _MEMORY, "index keys of packed rows: fp8 (132 bytes a key) or fp4 (68)"),
    Field("index_hadamard", _MEMORY, "rotate index keys before rounding: true, false; default: true for fp4 only"),
    Field("block_size", _MEMORY, "tokens of a cache block, a multiple of every compression ratio", ("--page-size",), 1),
    Field("num_blocks", _MEMORY, "blocks of the pool; 0: as many as fit"),
    Field(
        "kv_cache_memory_gib",
        _MEMORY,
        "GiB that each rank's cache may take; 0: all that is left of a GPU",
    ),
    Field("gpu_memory_gib", _MEMORY, "GiB of each GPU; 0: what it has (isthmus plan: must be given without a GPU)"),
    Field("pool_poison", _MEMORY, "fill pools with NaN at start, to prove that nothing unwritten is read"),
    Field(
        "max_num_batched_tokens",
        _BATCH,
        "tokens of one prefill chunk",
        ("--chunked-prefill-size", "--max-prefill-tokens"),
        1,
        1 << 20,
    ),
    Field("max_num_seqs", _BATCH, "sequences of one batch", ("--max-running-requests",), 1, 1 << 16),
    Field(
        "enforce_eager", _BATCH, "capture neither decode steps nor short chunks as CUDA graphs: slower, for debugging"
    ),
    Field(
        "max_model_len",
        _BATCH,
        "prompt and output of one request; 0: the model's maximum",
        ("--context-length",),
    ),
    Field("landings_ahead", _BATCH, "reservations that decode accepts beyond max_num_seqs", (), 0, 1 << 16),
    Field(
        "waiting_ahead",
        _BATCH,
        "prompts that prefill lets wait, whatever their length; more while all of them fit into one chunk",
        (),
        0,
        1 << 16,
    ),
    Field(
        "ranks",
        _PLACE,
        "processes of the group, one per GPU (tensor parallel)",
        ("--tensor-parallel-size", "--tp-size", "--tp"),
        1,
        1024,
    ),
    Field(
        "expert_parallel",
        _PLACE,
        "ranks share routed experts out instead of cutting each: true, false; default: what costs less",
        ("--enable-expert-parallel",),
    ),
    Field(
        "all_reduce",
        _PLACE,
        "how ranks with GPUs sum: auto, each size as was fastest when they met; nccl, all sizes; one-shot, through "
        "peers' memory up to 512 KiB, or the start fails. Others than auto are for comparisons and faulty machines",
    ),
    Field("device", _PLACE, "cpu, or cuda (each rank takes one GPU of those it sees)"),
    Field("threads", _PLACE, "CPU threads of a rank's arithmetic; small models are fastest with one", (), 1, 1024),
    Field("numa_node", _PLACE, "NUMA node to pin to; -1: not pinned", (), -1, 1023),
    Field("cpus", _PLACE, "CPU list such as 0-15,32 in place of the node's own"),
    Field(
        "transport",
        _NET,
        "what carries the cache: nixl; host, staged through shared memory; auto chooses between them for each pair by "
        "measurement; ucxx where it is installed; local serves tests inside one process",
        ("--disaggregation-transfer-backend",),
    ),
    Field("host", _NET, "address that the leader listens on"),
    Field("port", _NET, "port that the leader listens on; 0: a free one", (), 0, 65535),
    Field("worker_id", _NET, "name of the group in /topology and logs"),
    Field("landing_timeout_s", _NET, "seconds a landing may wait for its cache", (), 0.001),
    Field("transfer_timeout_s", _NET, "seconds that one write of cache may take; large ones get more", (), 0.001),
    Field(
        "kv_checksum", _NET, "compare every cache that lands with what was sent (costs one read of it on both sides)"
    ),
    Field("allow_tcp", _NET, "serve even if the cache travels over TCP inside one host, at a tenth of the speed"),
    Field("drain_timeout_s", _NET, "seconds that running requests get when the group stops"),
    Field("test_seams", _NET, "let tests hold requests and kill workers over HTTP: never in production"),
    Field("logits_log", _NET, "folder where ranks append the logits of every token (tests; needs test_seams)"),
)
_BY_NAME = {field.name: field for field in FIELDS}
_TYPES = get_type_hints(EngineConfig)
_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# other spellings of a value; both are common and mean the same
_SYNONYMS: dict[str, dict[str, str]] = {
    "dtype": {"fp32": "float32", "float": "float32", "bf16": "bfloat16"},
    "kv_cache_dtype": {"float32": "fp32", "bfloat16": "bf16", "fp8": "packed"},
    "index_cache_dtype": {"mxfp4": "fp4"},
}


def add_engine_flags(parser: argparse.ArgumentParser, *, without: Sequence[str] = ()) -> None:
    """Add a flag for every EngineConfig field but `role` and those in `without`. Absent flags leave no attribute."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    for title in dict.fromkeys(field.group for field in FIELDS):
        group = parser.add_argument_group(title)
        for field in FIELDS:
            if field.group == title and field.name not in without:
                default = defaults[field.name]
                shown = "" if default in (msgspec.NODEFAULT, "", None) else f" (default {default})"
                group.add_argument(
                    *field.flags,
                    dest=field.name,
                    default=argparse.SUPPRESS,
                    metavar="true|false" if _is_switch(field.name) else field.name.upper().rsplit("_", 1)[-1],
                    help=f"{field.help}{shown}".replace("%", "%%"),
                )


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv` (default: sys.argv); an unknown flag is one line that suggests the nearest one, not a page of usage.

    Raises ConfigError for it. argparse itself exits for what else can be wrong, such as a flag without its value.
    """
    args, unknown = parser.parse_known_args(argv)
    if not unknown:
        return args
    word = unknown[0].split("=")[0]
    near = difflib.get_close_matches(word, list(parser._option_string_actions), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "see --help"
    raise ConfigError(f"{word}: {'no such flag' if word.startswith('-') else 'one argument too many'}; {hint}")


def engine_config(
    args: argparse.Namespace, *, role: WorkerRole, yaml_section: dict[str, Any] | None, environ: Mapping[str, str]
) -> EngineConfig:
    """Merge flags in `args`, `environ` and `yaml_section` into one EngineConfig. Raises ConfigError."""
    layers = [flag_layer(args), environment_layer(environ), Layer("YAML", yaml_section or {})]
    return resolve(layers, role=role)[0]


def flag_layer(args: argparse.Namespace) -> Layer:
    """Return the engine flags that the user gave."""
    return Layer("flag", {name: value for name, value in vars(args).items() if name in _BY_NAME and value is not None})


def environment_layer(environ: Mapping[str, str], *, infix: str = "") -> Layer:
    """Return the settings in ISTHMUS_<infix><FIELD>; an empty variable counts as absent."""
    prefix = ENVIRONMENT_PREFIX + infix
    found = {name: environ[prefix + name.upper()] for name in _BY_NAME if environ.get(prefix + name.upper())}
    return Layer("environment", found)


def unknown_variables(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a line for each ISTHMUS_* variable that no setting reads: a misspelt one would be ignored in silence.

    known: names of settings beyond EngineConfig's.
    """
    names = {*_BY_NAME, *known}
    roles = ("PREFILL_", "DECODE_", "ROUTER_")
    lines = []
    for variable in sorted(environ):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        bare = next((name.removeprefix(role) for role in roles if name.startswith(role)), name)
        if variable.startswith(ENVIRONMENT_PREFIX) and not names & {name.lower(), bare.lower()}:
            near = difflib.get_close_matches(bare.lower(), sorted(names), n=1, cutoff=0.6)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{near[0].upper()}?" if near else ""
            lines.append(f"{variable}: no setting reads this variable{hint}")
    return lines


def resolve(layers: Sequence[Layer], *, role: WorkerRole) -> tuple[EngineConfig, dict[str, str]]:
    """Merge `layers`, first one wins; return the config and the origin of each of its fields.

    Raises ConfigError for an unknown key, a value of the wrong type or out of bounds, and a missing model.
    """
    values: dict[str, object] = {}
    origins = dict.fromkeys(_BY_NAME, "default")
    for layer in reversed(layers):
        for name, value in layer.values.items():
            require_known(name, _BY_NAME, where=layer.origin)
            values[name] = _convert(name, value, layer.origin)
            origins[name] = layer.origin
    if not values.get("model"):
        raise ConfigError(f"model: not given; add --model FOLDER, set {ENVIRONMENT_PREFIX}MODEL, or `model:` in YAML")
    config = EngineConfig(role=role, **values)  # type: ignore[arg-type]
    _require_transport(config, origins["transport"])
    _require_shard(config, origins)
    _require_exchange(config, origins["all_reduce"])
    if config.logits_log and not config.test_seams:
        raise ConfigError(
            f"logits_log = {config.logits_log!r} ({origins['logits_log']}): a test seam, and test_seams is false; "
            "leave it out, or set test_seams in a cluster that serves nobody"
        )
    return config, origins


def _require_shard(config: EngineConfig, origins: Mapping[str, str]) -> None:
    """Refuse what only synthetic weights can do, and a part of a group that there is not."""
    for name in ("simulate_rank", "num_layers"):
        value = getattr(config, name)
        if value and config.load_format != "synthetic":
            raise ConfigError(
                f"{name} = {value!r} ({origins[name]}): needs load_format synthetic, and that is "
                f"{config.load_format!r}; checkpoints are loaded whole"
            )
    try:
        shard = Shard.parse(config.simulate_rank)
    except ValueError as problem:
        raise ConfigError(f"simulate_rank = {config.simulate_rank!r} ({origins['simulate_rank']}): {problem}") from None
    if shard.count > 1 and config.ranks > 1:
        raise ConfigError(
            f"simulate_rank = {config.simulate_rank!r} ({origins['simulate_rank']}): one process stands for the group, "
            f"and ranks is {config.ranks}; leave one of them out"
        )


def _require_transport(config: EngineConfig, origin: str) -> None:
    """Refuse a transport that can't carry the cache of this group from process to process."""
    if config.transport == "local":
        raise ConfigError(
            f"transport = 'local' ({origin}): works inside one process only, and every rank is a process of its own; "
            "wanted auto, nixl, host, or ucxx where it is installed"
        )
    if config.transport == "ucxx" and config.device != "cpu":
        raise ConfigError(
            f"transport = 'ucxx' ({origin}): carries host memory only, and device is {config.device!r}; wanted auto, "
            "nixl or host"
        )


def _require_exchange(config: EngineConfig, origin: str) -> None:
    """Refuse ways of GPUs for ranks that have none."""
    if config.all_reduce != "auto" and config.device != "cuda":
        raise ConfigError(
            f"all_reduce = {config.all_reduce!r} ({origin}): a way of GPUs, and device is {config.device!r}, where "
            "ranks exchange by gloo; leave it at auto"
        )


def require_known(name: str, known: Mapping[str, object] | Sequence[str], *, where: str) -> None:
    """Raise ConfigError if `name` is none of `known`, with the nearest one as a suggestion."""
    if name in known:
        return
    near = difflib.get_close_matches(str(name).replace("-", "_"), list(known), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
    raise ConfigError(f"{name} ({where}): no such setting; {hint}")


def _convert(name: str, value: object, origin: str) -> object:
    """Return `value` in the field's type, within its bounds."""
    field, kind = _BY_NAME[name], _TYPES[name]
    if isinstance(value, str):
        value = value.strip()
        value = _SYNONYMS.get(name, {}).get(value.lower(), value)
    if isinstance(value, bool) and kind in (int, float, str):
        raise ConfigError(f"{name} = {value!r} ({origin}): wanted {_wanted(name)}")
    if kind is str and isinstance(value, int | float):
        value = str(value)  # YAML reads `cpus: 3` and `served_model_name: 4` as numbers
    try:
        result = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        raise ConfigError(f"{name} = {value!r} ({origin}): wanted {_wanted(name)}") from None
    if isinstance(result, int | float) and not isinstance(result, bool) and not field.low <= result <= field.high:
        raise ConfigError(f"{name} = {result} ({origin}): out of bounds; wanted {_wanted(name)}")
    if name == "worker_id" and result and not _WORKER_ID.fullmatch(str(result)):
        raise ConfigError(
            f"worker_id = {value!r} ({origin}): names log files; wanted letters, digits, `_`, `-` and `.`, the "
            "first a letter or digit"
        )
    if name == "cpus" and result:
        try:
            parse_cpu_list(str(result))
        except ValueError as error:
            raise ConfigError(f"{error} ({origin})") from None
    return result


def _is_switch(name: str) -> bool:
    kind = _TYPES[name]
    return kind is bool or bool in getattr(kind, "__args__", ())


def _wanted(name: str) -> str:
    """Say in words what a field takes."""
    field, kind = _BY_NAME[name], _TYPES[name]
    choices = getattr(kind, "__args__", ())
    if kind in (int, float):
        noun = "a whole number" if kind is int else "a number"
        if field.high >= _CEILING:
            return f"{noun} of at least {field.low:g}"
        return f"{noun} from {field.low:g} to {field.high:g}"
    if _is_switch(name):
        return "true or false"
    if choices:
        return "one of " + ", ".join(str(choice) for choice in choices)
    return "a text"
