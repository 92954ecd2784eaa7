"""RouterConfig, from flags, environment and defaults: flag > ISTHMUS_* variable > default.

Every field has a flag (`--max-queue`) and an environment twin (`ISTHMUS_MAX_QUEUE`); lists are repeated flags, or
separated by commas in the variable.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

ENV_PREFIX = "ISTHMUS_"
LogLevel = Literal["debug", "info", "warning", "error"]

_HELP: dict[str, str] = {
    "model": "model folder with tokenizer.json and config.json; without a tokenizer only token ids are served",
    "prefill": "URL of a prefill worker; repeat for more",
    "decode": "URL of a decode worker; repeat for more",
    "host": "address to listen on",
    "port": "port of the public API",
    "served_model_name": "name that clients ask for; default: the model folder's name",
    "default_thinking": "whether chat answers begin with reasoning unless the request says otherwise",
    "max_body_mib": "largest request body",
    "max_queue": "requests that may wait for a pair; one more is answered 429",
    "queue_timeout_s": "longest wait for a pair",
    "reserve_timeout_s": "longest wait for decode's answer to a reservation",
    "prefill_timeout_s": "longest time from prefill's start to the first token",
    "transfer_timeout_s": "longest time from the first token to decode's first",
    "decode_timeout_s": "longest silence between two tokens of a running answer",
    "body_timeout_s": "longest time a client may take to send its request",
    "send_timeout_s": "longest time a client may take to accept a piece of its answer",
    "drain_timeout_s": "how long running answers may go on after SIGTERM",
    "worker_silence_s": "silence of a worker's stream after which it is looked for",
    "worker_lost_s": "time out of reach after which a worker counts as lost",
    "max_retries": "times a request is tried again after a worker failed it",
    "resume_timeout_s": "how long a request that a worker failed waits for a pair to be ready again: its client hears "
    "of it within 10 s; more where somebody starts workers again",
    "control_socket": "Unix socket on which workers join, drain and leave while the router serves (router/control.py); "
    "only this user can open it",
    "log_level": "how much is logged",
    "test_seams": "let tests hold the queue and force tokens: never in production",
}

_EXAMPLES = """\
examples:
  # one pair on this machine, workers started by hand
  python -m router --model ./dsv4-tiny --prefill http://127.0.0.1:9001 --decode http://127.0.0.1:9101

  # two prefill workers feeding one decode worker, reachable from outside
  python -m router --model /models/DeepSeek-V4-Flash --host 0.0.0.0 --port 8000 \\
      --prefill http://10.0.0.1:9001 --prefill http://10.0.0.2:9001 --decode http://10.0.0.3:9101

  # the same by environment
  ISTHMUS_PREFILL=http://10.0.0.1:9001,http://10.0.0.2:9001 ISTHMUS_DECODE=http://10.0.0.3:9101 \\
      ISTHMUS_MODEL=/models/DeepSeek-V4-Flash python -m router

Then watch GET /ready (503 with the state until a pair is ready) and GET /topology. Each flag has an environment
twin: --max-queue is ISTHMUS_MAX_QUEUE. A flag wins over the variable, the variable over the default.
"""


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the router is told. Times are seconds. See `--help` for each field."""

    model: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""
    default_thinking: bool = False
    max_body_mib: float = 16
    max_queue: int = 1024
    queue_timeout_s: float = 600.0
    reserve_timeout_s: float = 10.0
    prefill_timeout_s: float = 300.0
    transfer_timeout_s: float = 300.0
    decode_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0
    worker_silence_s: float = 2.0
    worker_lost_s: float = 1.5
    max_retries: int = 2
    resume_timeout_s: float = 6.0
    control_socket: str = ""
    log_level: LogLevel = "info"
    test_seams: bool = False

    def __post_init__(self) -> None:
        for field in ("prefill", "decode"):
            urls = getattr(self, field)
            if not urls:
                raise ValueError(f"{field}: at least one URL is needed, as in --{field} http://127.0.0.1:9001")
            for url in urls:
                if not url.startswith(("http://", "https://")):
                    raise ValueError(f"{field}: {url!r} is no URL; write http://HOST:PORT")
            if len(set(urls)) != len(urls):
                raise ValueError(f"{field}: the same URL is given twice")
        if both := set(self.prefill) & set(self.decode):
            raise ValueError(f"{both.pop()} is given both as prefill and as decode")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} must be in [0, 65535]")
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if field.endswith("_s") and not value > 0:
                raise ValueError(f"{field}: {value} must be above 0")
            if field in ("max_queue", "max_body_mib") and not value > 0:
                raise ValueError(f"{field}: {value} must be above 0")
        if self.max_retries < 0:
            raise ValueError(f"max_retries: {self.max_retries} must be at least 0")

    @property
    def model_name(self) -> str:
        """The name that clients ask for."""
        return self.served_model_name or _folder_name(self.model)

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * (1 << 20))


@functools.cache  # asked for in every request
def _folder_name(folder: str) -> str:
    return Path(folder).resolve().name


def load(argv: Sequence[str], environ: Mapping[str, str]) -> RouterConfig:
    """Return the configuration of a command line. Exits with a message for a value that can't be (argparse's way)."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        near = difflib.get_close_matches(word, list(parser._option_string_actions), n=1, cutoff=0.6)
        parser.error(f"{word}: no such flag; " + (f"did you mean {near[0]}?" if near else "see --help"))
    flags = {k: v for k, v in vars(args).items() if v is not None}
    values: dict[str, Any] = {}
    for field, kind in _kinds().items():
        variable = ENV_PREFIX + field.upper()
        if field in flags:
            values[field] = flags[field]
        elif environ.get(variable, "") != "":
            text = environ[variable]
            try:
                values[field] = text.split(",") if _is_list(kind) else _convert(text, kind)
            except ValueError as error:
                parser.error(f"{variable}: {error}")
    for field in ("prefill", "decode"):
        if field in values:
            values[field] = tuple(url.strip().rstrip("/") for url in values[field] if url.strip())
    missing = [f"--{field}" for field in ("model", "prefill", "decode") if not values.get(field)]
    if missing:
        parser.error(f"{', '.join(missing)}: needed; see --help for examples")
    try:
        return RouterConfig(**values)
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isthmus router",
        description="OpenAI-compatible front of an Isthmus cluster: text in, text out; the workers see tokens only.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    aliases = {"model": ["--model-path"], "max_queue": ["--queue-size", "--max-queued-requests"]}
    defaults = dict(
        zip(
            RouterConfig.__struct_fields__[-len(RouterConfig.__struct_defaults__) :],
            RouterConfig.__struct_defaults__,
            strict=True,
        )
    )
    for field, kind in _kinds().items():
        names = [f"--{field.replace('_', '-')}", *aliases.get(field, [])]
        default = defaults.get(field)
        shown = f" (default: {default})" if default not in (None, "", msgspec.NODEFAULT) else ""
        options: dict[str, Any] = {"dest": field, "help": _HELP[field].replace("%", "%%") + shown}
        if _is_list(kind):
            parser.add_argument(*names, action="append", metavar="URL", **options)
        elif kind is bool:
            parser.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, **options)
        elif typing.get_origin(kind) is Literal:
            parser.add_argument(*names, choices=typing.get_args(kind), **options)
        else:
            parser.add_argument(*names, type=kind, metavar=kind.__name__.upper(), **options)
    return parser


def _kinds() -> dict[str, Any]:
    return typing.get_type_hints(RouterConfig)


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _convert(text: str, kind: Any) -> Any:
    if kind is bool:
        if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ValueError(f"{text!r} is neither true nor false")
        return text.lower() in ("1", "true", "yes", "on")
    if typing.get_origin(kind) is Literal:
        if text not in typing.get_args(kind):
            raise ValueError(f"{text!r} is none of {', '.join(typing.get_args(kind))}")
        return text
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{text!r} is no {kind.__name__}") from None
