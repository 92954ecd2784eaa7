"""ClusterConfig: one YAML file, its flags and its environment, merged into one EngineConfig per worker group.

    model: dsv4-tiny             # keys of EngineConfig at the top are shared by every group ...
    kv_cache_dtype: fp32
    prefill: {numa_node: 0}      # ... and may be overridden per role; a list makes several groups of that role
    decode: {numa_node: 1}
    router: {port: 8000}         # fields of RouterConfig, the flags of `python -m router`
    supervisor: {max_restarts: 10}

Precedence per field: --prefill-X, --X, ISTHMUS_PREFILL_X, ISTHMUS_X, YAML section, YAML top, default.
This module reads files; it starts nothing and imports neither Ray nor torch.
"""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from deploy import tiny_model
from deploy.host_wish import HostWish, take_wish
from engine import flags as engine_flags
from engine.config import EngineConfig
from engine.flags import (
    FIELDS,
    ConfigError,
    Layer,
    add_engine_flags,
    environment_layer,
    require_known,
    resolve,
)
from engine.model.published import is_published
from router.config import RouterConfig
from router.protocol import WorkerRole

ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")
DEFAULT_YAML = "tiny.yaml"

# they belong to one process: at the top of the file host and port are the router's
PER_GROUP = ("worker_id", "host", "port")
# `up` says these itself
_GIVEN_TO_ROUTER = ("model", "served_model_name", "prefill", "decode", "host", "port", "control_socket")
_ROUTER_OPTIONS = tuple(name for name in RouterConfig.__struct_fields__ if name not in _GIVEN_TO_ROUTER)
_SHARED = tuple(field.name for field in FIELDS if field.name not in PER_GROUP)


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """options: further fields of RouterConfig."""

    host: str = "127.0.0.1"
    port: int = 8000
    options: dict[str, Any] = {}

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `isthmus up` does about processes that die or don't get ready.

    max_restarts: of one group, or the router, within restart_window_s; one more ends the cluster.
    ready_timeout_s: from start to the first ready pair; 0 waits for ever (large checkpoints).
    ray_address: "" starts a private Ray on this host; otherwise the cluster to join, such as "auto".
    """

    max_restarts: int = 10
    restart_window_s: float = 600.0
    restart_backoff_s: float = 0.5
    ready_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    ray_address: str = ""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """source: the YAML file, for people. groups: every worker group, prefill first, with worker_id set.

    origins: per worker_id, where each field came from.   wishes: per worker_id, which host of a joined Ray it wants.
    """

    source: str
    groups: tuple[EngineConfig, ...]
    router: RouterSettings
    supervisor: SupervisorSettings
    origins: dict[str, dict[str, str]] = {}
    wishes: dict[str, HostWish] = {}

    @property
    def model(self) -> str:
        return self.groups[0].model

    @property
    def served_model_name(self) -> str:
        return self.groups[0].served_model_name or Path(self.model).resolve().name

    @property
    def without_node(self) -> frozenset[str]:
        """Return the worker_ids of groups whose numa_node nobody has set: `place` chooses it."""
        return frozenset(name for name, origin in self.origins.items() if origin.get("numa_node") == "default")


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Add the YAML file, the router's address and every shared engine flag, each with a twin for one role only."""
    parser.add_argument(
        "config", nargs="?", default="", metavar="YAML", help="configuration file (default: the built-in tiny.yaml)"
    )
    router = parser.add_argument_group("router")
    router.add_argument("--host", default=argparse.SUPPRESS, help="address of the API (default 127.0.0.1)")
    router.add_argument("--port", default=argparse.SUPPRESS, help="port of the API (default 8000)")
    add_engine_flags(parser, without=PER_GROUP)
    twins = parser.add_argument_group(
        "one role only",
        "any worker flag above as --prefill-X or --decode-X, and any flag of `isthmus router` as --router-X",
    )
    names = [f"{role}_{field.name}" for role in ROLES for field in FIELDS]
    for name in [*names, *(f"router_{option}" for option in _ROUTER_OPTIONS)]:
        twins.add_argument("--" + name.replace("_", "-"), dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def load_cluster_config(args: argparse.Namespace, environ: Mapping[str, str]) -> ClusterConfig:
    """Merge the YAML file named by `args` with flags and environment. Writes `dsv4-tiny` if that is the model.

    Raises ConfigError with the field, the value and the remedy.
    """
    path, document = _read_yaml(getattr(args, "config", ""))
    known = [*_SHARED, "host", "port", *ROLES, "router", "supervisor"]
    for name in document:
        require_known(name, known, where=path)
    flags = {name: value for name, value in vars(args).items() if value is not None}
    groups: list[EngineConfig] = []
    origins: dict[str, dict[str, str]] = {}
    wishes: dict[str, HostWish] = {}
    supervisor = _supervisor_settings(document, path)
    for role in ROLES:
        sections = _sections(document, role, path)
        for index, section in enumerate(sections):
            wish = take_wish(section, where=f"{path}, {role}")
            require_joined_ray(wish, supervisor, where=f"{path}, {role}")
            layers = [
                Layer("flag", {f.name: flags[f"{role}_{f.name}"] for f in FIELDS if f"{role}_{f.name}" in flags}),
                Layer("flag", {name: flags[name] for name in _SHARED if name in flags}),
                environment_layer(environ, infix=f"{role.upper()}_"),
                Layer("environment", _only(environment_layer(environ).values, _SHARED)),
                Layer(f"{path}, {role}", section),
                Layer(path, _only(document, _SHARED)),
                Layer("default", {"worker_id": f"{role}-{index}"}),
            ]
            group, origin = resolve(layers, role=role)
            groups.append(msgspec.structs.replace(group, model=resolve_model(group.model, environ)))
            origins[group.worker_id], wishes[group.worker_id] = origin, wish
    require_consistent(groups)
    return ClusterConfig(
        source=path,
        groups=tuple(groups),
        router=_router_settings(document, flags, environ, path),
        supervisor=supervisor,
        origins=origins,
        wishes=wishes,
    )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each ISTHMUS_* variable that nothing reads: a misspelt one would be ignored in silence."""
    return engine_flags.unknown_variables(environ, known=[*_ROUTER_OPTIONS, "prefill", "decode"])


def resolve_model(model: str, environ: Mapping[str, str]) -> str:
    """Return the model's folder, absolute; `dsv4-tiny` is written into the cache directory on first use.

    A published model that is not here is returned as it was given: a plan and synthetic weights need its config only.
    """
    folder = Path(model).expanduser()
    if model == tiny_model.NAME and not folder.exists():
        return str(tiny_model.ensure_tiny_model(environ))
    if not (folder / "config.json").is_file():
        if is_published(model):
            return model
        raise ConfigError(
            f"model = {model!r}: {folder / 'config.json'} does not exist; wanted a folder with config.json and "
            f"safetensors files, or the name {tiny_model.NAME}"
        )
    return str(folder.resolve())


def require_joined_ray(wish: HostWish, supervisor: SupervisorSettings, *, where: str) -> None:
    """Refuse a wish for a host where there is only this one."""
    if wish and not supervisor.ray_address:
        raise ConfigError(
            f"node, ray_resources ({where}): a private Ray has this host only; name the Ray cluster that has others "
            "with `supervisor: {ray_address: auto}`"
        )


def _read_yaml(path: str) -> tuple[str, dict[str, Any]]:
    if path:
        try:
            text, name = Path(path).read_text(), path
        except OSError as error:
            raise ConfigError(f"{path}: can't be read: {error.strerror}; give the path of a YAML file") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not text in UTF-8: {error.reason} at byte {error.start}") from None
    else:
        text, name = (importlib.resources.files("deploy") / DEFAULT_YAML).read_text(), f"built-in {DEFAULT_YAML}"
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}{_what_is_no_yaml(error)}") from None
    if document is None:
        return name, {}
    if not isinstance(document, dict):
        raise ConfigError(f"{name}: wanted `key: value` lines, found a {type(document).__name__}")
    return name, {str(key): value for key, value in document.items() if value is not None}


def _what_is_no_yaml(error: yaml.YAMLError) -> str:
    """Return line and problem of a syntax error, and the line before it where the parser lost its way."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": not YAML: {' '.join(str(error).split())}"
    begun = f" ({error.context}, line {error.context_mark.line + 1})" if error.context and error.context_mark else ""
    return f", line {error.problem_mark.line + 1}: not YAML: {error.problem}{begun}"


def _sections(document: Mapping[str, Any], role: str, path: str) -> list[dict[str, Any]]:
    """Return the role's sections: one for a mapping, several for a list, one empty if the file has none."""
    value = document.get(role, {})
    sections = value if isinstance(value, list) else [value]
    if not sections or not all(isinstance(section, dict) for section in sections):
        raise ConfigError(f"{role} ({path}): wanted a mapping of settings, or a list with one mapping per group")
    return [{str(key): setting for key, setting in section.items() if setting is not None} for section in sections]


def require_consistent(groups: Sequence[EngineConfig]) -> None:
    """Refuse what could never link: groups must agree on everything that shapes the cache."""
    first = groups[0]
    ids = [group.worker_id for group in groups]
    if repeated := {worker_id for worker_id in ids if ids.count(worker_id) > 1}:
        raise ConfigError(
            f"worker_id = {sorted(repeated)[0]!r}: used by two groups; leave it out, or name each group once"
        )
    weights = ("model", "load_format", "simulate_rank", "num_layers", "dtype")
    rows = ("kv_cache_dtype", "index_cache_dtype", "uses_hadamard", "block_size")
    for name in (*weights, *rows, "transport"):
        for group in groups[1:]:
            wanted, found = getattr(first, name), getattr(group, name)
            if wanted != found:
                raise ConfigError(
                    f"{name}: {first.worker_id} has {wanted!r}, {group.worker_id} has {found!r}; one could not "
                    f"read the other's cache: set {name} once, at the top of the file"
                )


def _router_settings(
    document: Mapping[str, Any], flags: Mapping[str, Any], environ: Mapping[str, str], path: str
) -> RouterSettings:
    section = document.get("router", {})
    if not isinstance(section, dict):
        raise ConfigError(f"router ({path}): wanted a mapping of settings, found {section!r}")
    found: dict[str, Any] = {}
    for name in ("host", "port"):
        for origin, value in (
            ("flag", flags.get(name)),
            ("environment", environ.get(f"ISTHMUS_{name.upper()}") or None),
            (f"{path}, router", section.get(name)),
            (path, document.get(name)),
        ):
            if value is not None:
                found[name] = _port(value, origin) if name == "port" else str(value)
                break
    return RouterSettings(options=_router_options(section, flags, environ, path), **found)


def _router_options(
    section: Mapping[str, Any], flags: Mapping[str, Any], environ: Mapping[str, str], path: str
) -> dict[str, Any]:
    for name in section:
        require_known(str(name), ["host", "port", *_ROUTER_OPTIONS], where=f"{path}, router")
    options: dict[str, Any] = {}
    for name in _ROUTER_OPTIONS:
        if (flag := flags.get(f"router_{name}")) is not None:
            options[name] = flag
        elif not environ.get(f"ISTHMUS_{name.upper()}") and section.get(name) is not None:
            options[name] = section[name]  # the router reads the environment itself
    sample = {"model": "m", "prefill": ["http://p"], "decode": ["http://d"]}
    try:
        msgspec.convert({**sample, **options}, RouterConfig, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"router ({path}): {error}") from None
    return options


def _port(value: object, origin: str) -> int:
    try:
        port = int(str(value))
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise ConfigError(f"port = {value!r} ({origin}): wanted a whole number from 1 to 65535")
    return port


def _supervisor_settings(document: Mapping[str, Any], path: str) -> SupervisorSettings:
    section = document.get("supervisor", {})
    if not isinstance(section, dict):
        raise ConfigError(f"supervisor ({path}): wanted a mapping of settings, found {section!r}")
    for name in section:
        require_known(name, SupervisorSettings.__struct_fields__, where=f"{path}, supervisor")
        if isinstance(section[name], int | float) and not section[name] >= 0:
            raise ConfigError(f"{name} = {section[name]} ({path}, supervisor): wanted a number of at least 0")
    try:
        return msgspec.convert(section, SupervisorSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"supervisor ({path}): {error}") from None


def _only(values: Mapping[str, object], names: tuple[str, ...]) -> dict[str, object]:
    return {name: values[name] for name in names if name in values}
