"""What `isthmus model check` finds in a checkpoint folder: headers, configs, tokenizer, encoding; no tensor's values.

Nothing here raises because of what it finds: what is wrong becomes a finding. No torch.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from deploy.check_rules import Finding
from engine.model.config import WEIGHT_INDEX, ConfigError, DeepSeekV4Config, StoredExperts, StoredMatrices, load_config
from engine.model.shard_files import ShardFiles, StoredTensor, read_headers
from engine.model.stored_forms import BESIDE, DRAFT, FLOATS, beside, check_forms, form_of
from engine.model.tensor_specs import tensor_specs
from kernels.table import counted
from router.chat import ASSISTANT, BOS, EOS, USER
from router.encoding import FOLDER, MARKUP, EncodingTexts
from router.tokenizer import TOKENIZER_FILE, Tokenizer

# Sizes by which a published model is known: layers, hidden size, heads, experts, inner size.
_SIZES = {
    "DeepSeek-V4-Flash": (43, 4096, 64, 256, 2048),
    "DeepSeek-V4-Pro": (61, 7168, 128, 384, 3072),
}
_GROUPS = (
    ("experts.", "routed experts"),
    ("shared_experts.", "shared experts"),
    ("indexer.", "indexer"),
    ("compressor.", "compressors"),
    ("hc_", "hyper-connections"),
    ("attn.", "attention"),
    ("gate.", "gate"),
    ("embed.", "embedding"),
    ("head.", "head"),
)
# Of an encoding file, what requests may need; it has other constants.
_TEXTS = ("TOOLS_TEMPLATE", "response_format_template", "DS_TASK_SP_TOKENS", *MARKUP)
_EFFORTS = "REASONING_EFFORT"
_SOURCE = "copy it from where the weights came from"


class Stored(msgspec.Struct, frozen=True):
    """Tensors of one group in one form. num_bytes: with their scales, which `tensors` does not count."""

    group: str
    form: str
    tensors: int
    num_bytes: int


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """config: None if it can't be served.   stored: of the main model.   drafting: of each `mtp.*` block, by stage.

    declared: the experts' form by config.json, "" without one.   findings: all of them, "ok" ones too.
    """

    folder: str
    variant: str
    num_files: int
    num_tensors: int
    num_bytes: int
    stored: list[Stored]
    drafting: list[Stored]
    declared: str
    config: DeepSeekV4Config | None
    findings: list[Finding]


def read_facts(folder: Path) -> ModelFacts:
    """Look at a folder."""
    findings: list[Finding] = []
    config = _config(folder, findings)
    files = _files(folder, findings)
    tensors = {} if files is None else files.tensors
    stored = _stored(tensors, (name for name in tensors if not name.startswith(DRAFT)))
    drafting = _drafting(tensors)
    declared = "" if config is None else config.stored_experts
    if files is not None and config is not None and not files.problems:
        findings += _forms(files, config)
        seen = _as_stored(config, stored)
        if not any(finding.level == "problem" for finding in findings):
            findings += _declared(config, seen)
        config = seen
    variant = "not known" if config is None else _variant(config, _raw(folder), stored, drafting)
    if drafting:
        names = ", ".join(f"{each.group} ({each.form})" for each in drafting)
        findings.append(Finding("drafting", "ok", f"{names}: read past, answers are decoded without drafts"))
    findings += _tokenizer(folder, config)
    findings += _encoding(folder, variant)
    findings += _side_files(folder)
    return ModelFacts(
        folder=str(folder),
        variant=variant,
        num_files=0 if files is None else len(files.paths),
        num_tensors=len(tensors),
        num_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        stored=stored,
        drafting=drafting,
        declared=declared,
        config=config,
        findings=findings,
    )


def problem(topic: str, text: str, remedy: str) -> Finding:
    """Return the finding of an error's text, whose own remedy wins if it has one behind a semicolon."""
    seen, semicolon, own = text.rpartition("; ")
    return Finding(topic, "problem", seen if semicolon else text, own if semicolon else remedy)


def _config(folder: Path, findings: list[Finding]) -> DeepSeekV4Config | None:
    try:
        config = load_config(folder)
    except ConfigError as error:
        findings.append(problem("config.json", str(error), "take the files published with the checkpoint"))
        return None
    seen = f"{counted(config.num_hidden_layers, 'layer')}, hidden size {config.hidden_size}, "
    seen += counted(config.n_routed_experts, "expert")
    kinds = collections.Counter(config.kind(layer) for layer in range(config.num_hidden_layers))
    seen += f"; attention {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
    findings.append(Finding("config.json", "ok", f"{seen}; {counted(config.num_hash_layers, 'hash layer')}"))
    return config


def _files(folder: Path, findings: list[Finding]) -> ShardFiles | None:
    try:
        files = read_headers(folder)
    except ConfigError as error:
        findings.append(problem("weight files", str(error), "fetch what is missing"))
        return None
    findings += [problem("weight files", text, "fetch the files of one revision again") for text in files.problems]
    if not files.problems:
        how = WEIGHT_INDEX if (folder / WEIGHT_INDEX).is_file() else "one file, no index: none is needed"
        findings.append(
            Finding("weight files", "ok", f"{len(files.paths)} whole, {len(files.tensors):,} tensors; {how}")
        )
    return files


def _forms(files: ShardFiles, config: DeepSeekV4Config) -> list[Finding]:
    problems = check_forms(files, tensor_specs(config), config)
    if not problems:
        return [Finding("tensors", "ok", "all that config.json asks for, each in a form that is read")]
    remedy = "take config.json and weights of one revision"
    if any(name.startswith(("model.layers.", "model.embed_tokens.")) for name in files.tensors):
        remedy = "names of transformers' own export: take the official checkpoint, whose names begin with `layers.`"
    elif any(name.startswith(("vision", "aligner", "visual")) for name in files.tensors):
        remedy = "tensors of a vision model, which is not implemented: serve DeepSeek-V4-Flash or -0731"
    return [problem("tensors", text, remedy) for text in problems]


def _stored(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> list[Stored]:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for name in names:
        owner = _owner(tensors, name)
        key = _group_of(owner), form_of(tensors, owner)
        counts[key] += owner == name
        sizes[key] += tensors[name].num_bytes
    found = [Stored(group, form, counts[group, form], size) for (group, form), size in sizes.items()]
    return sorted(found, key=lambda each: -each.num_bytes)


def _owner(tensors: Mapping[str, StoredTensor], name: str) -> str:
    """Return the weight beside which a tensor lies, or its own name."""
    base, _, suffix = name.rpartition(".")
    weight = f"{base}.weight"
    return weight if suffix in BESIDE and beside(weight, suffix) == name and weight in tensors else name


def _group_of(name: str) -> str:
    place = name.split(".", 2)[-1] if name.startswith("layers.") else name
    place = place.removeprefix("ffn.")
    if place.endswith("norm.weight") and "." not in place.removesuffix(".weight"):
        return "norms"
    return next((group for mark, group in _GROUPS if place.startswith(mark) or f".{mark}" in f".{place}"), "other")


def _drafting(tensors: Mapping[str, StoredTensor]) -> list[Stored]:
    stages: dict[str, list[str]] = collections.defaultdict(list)
    for name in tensors:
        if name.startswith(DRAFT):
            stages[".".join(name.split(".")[:2])].append(name)
    is_dspark = any("main_proj" in name or "markov_head" in name for names in stages.values() for name in names)
    kind = "DSpark stage" if is_dspark else "MTP block"
    return [
        Stored(stage, kind, len(names), sum(tensors[name].num_bytes for name in names))
        for stage, names in sorted(stages.items())
    ]


def _as_stored(config: DeepSeekV4Config, stored: list[Stored]) -> DeepSeekV4Config:
    """Return the config with the forms that were seen: of each, the one that has most bytes."""

    def form(group: str, known: tuple[str, ...]) -> str | None:
        found = next((each.form for each in stored if each.group == group), None)
        found = "float" if found is not None and found.upper() in FLOATS else "fp8" if found == "e4m3" else found
        return found if found in known else None

    experts = form("routed experts", get_args(StoredExperts)) or config.stored_experts
    matrices = form("attention", get_args(StoredMatrices)) or config.stored_matrices
    return msgspec.structs.replace(config, stored_experts=experts, stored_matrices=matrices)


def _declared(config: DeepSeekV4Config, seen: DeepSeekV4Config) -> list[Finding]:
    pairs = (
        ("routed experts", config.stored_experts, seen.stored_experts, "expert_dtype and quantization_config"),
        ("linear layers", config.stored_matrices, seen.stored_matrices, "quantization_config"),
    )
    return [
        Finding(
            "config.json",
            "warning",
            f"{fields} say that {what} are {said}; they are stored as {found}, and are read so, but the memory plan "
            f"of `isthmus up` counts {said}",
            f"correct {fields}, or take the config.json published with the weights",
        )
        for what, said, found, fields in pairs
        if said != found
    ]


def _variant(config: DeepSeekV4Config, raw: Mapping[str, Any], stored: list[Stored], drafting: list[Stored]) -> str:
    layers, hidden = config.num_hidden_layers, config.hidden_size
    sizes = (hidden, config.num_attention_heads, config.n_routed_experts, config.moe_intermediate_size)
    name = next((name for name, (_, *theirs) in _SIZES.items() if sizes == tuple(theirs)), "")
    if not name:
        return f"no published variant: {counted(layers, 'layer')} of hidden size {hidden}"
    all_layers = _SIZES[name][0]
    if any(key.startswith("dspark_") for key in raw) or any("DSpark" in each.form for each in drafting):
        name += "-0731" if name == "DeepSeek-V4-Flash" else " with DSpark"
    forms = {each.form for each in stored if each.group == "routed experts"}
    name += "-NVFP4" if "nvfp4" in forms else "-Base" if forms == {"e4m3"} else ""
    return name if layers == all_layers else f"{name}'s shapes, {counted(layers, 'layer')} of {all_layers}"


def _raw(folder: Path) -> dict[str, Any]:
    try:
        raw = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _tokenizer(folder: Path, config: DeepSeekV4Config | None) -> list[Finding]:
    path = folder / TOKENIZER_FILE
    if not path.exists():
        seen = f"no {TOKENIZER_FILE}: only prompts of token ids can be served, no text and no chat"
        return [Finding("tokenizer", "warning", seen, _SOURCE)]
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except (ValueError, OSError) as error:
        return [problem("tokenizer", f"{error}", f"{_SOURCE}; the router does not start with it")]
    assert tokenizer is not None
    if config is not None and tokenizer.vocab_size > config.vocab_size:
        seen = f"{TOKENIZER_FILE} has {tokenizer.vocab_size} tokens, the model {config.vocab_size}"
        return [Finding("tokenizer", "problem", seen, f"another model's: {_SOURCE}")]
    lacking = [token for token in (BOS, EOS, USER, ASSISTANT) if tokenizer.token_id(token) is None]
    if lacking:
        seen = f"{TOKENIZER_FILE} lacks {', '.join(lacking)}, of which chat prompts are made"
        return [Finding("tokenizer", "warning", seen, f"{_SOURCE}, or send prompts of your own to /v1/completions")]
    return [Finding("tokenizer", "ok", f"{tokenizer.vocab_size:,} tokens, those of chats among them")]


def _encoding(folder: Path, variant: str) -> list[Finding]:
    try:
        texts = EncodingTexts.from_folder(folder)
    except (ValueError, OSError) as error:
        return [problem("encoding", str(error), f"{_SOURCE}; the router does not start with it")]
    if texts is None:
        seen = f"no {FOLDER}/*.py: chats go, but tools, response formats and efforts that need its texts are refused"
        return [Finding("encoding", "warning", seen, _SOURCE)]
    if unreadable := sorted(name for name in texts.unreadable if name in _TEXTS or name.startswith(_EFFORTS)):
        names = ", ".join(unreadable)
        seen = f"{texts.source}: can't be read as constants: {names}; requests that need them are refused"
        return [Finding("encoding", "warning", seen, _SOURCE)]
    if "0731" in variant and texts.release == "V4-Flash":
        seen = f"{texts.source} is of V4-Flash, the weights are of -0731: efforts would have the wrong texts"
        return [Finding("encoding", "warning", seen, _SOURCE)]
    return [
        Finding("encoding", "ok", f"{texts.source}: {counted(len(texts.constants), 'text')}, as of {texts.release}")
    ]


def _side_files(folder: Path) -> list[Finding]:
    found = []
    for name, without in (
        ("generation_config.json", "ends and sampling are config.json's and the request's alone"),
        ("tokenizer_config.json", "nothing here reads it, other tools do"),
    ):
        path = folder / name
        if not path.is_file():
            found.append(Finding(name, "ok", f"not there: {without}"))
            continue
        try:
            json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            is_read = name == "generation_config.json"  # with config.json, which says so then
            found.append(Finding(name, "problem" if is_read else "warning", f"can't be read ({error})", _SOURCE))
        else:
            found.append(Finding(name, "ok", "there"))
    return found
