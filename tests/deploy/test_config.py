"""deploy/config.py: one file, two groups, and refusals that name the place."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from deploy.config import ClusterConfig, add_cluster_flags, load_cluster_config
from deploy.router_process import router_environment, router_flags
from deploy.scale import read_settings
from engine.flags import ConfigError
from router import config as router_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def load(tmp_path: Path, model: str):
    """A function of YAML text, flags and environment to ClusterConfig; `model` is given unless the text has one."""

    def load(text: str = "", *words: str, environ: dict[str, str] | None = None) -> ClusterConfig:
        path = tmp_path / "cluster.yaml"
        path.write_text(text if "model:" in text else f"model: {model}\n{text}")
        parser = argparse.ArgumentParser()
        add_cluster_flags(parser)
        return load_cluster_config(parser.parse_args([str(path), *words]), environ or {})

    return load


def test_keys_at_the_top_reach_both_groups(load) -> None:
    assert [group.max_num_seqs for group in load("max_num_seqs: 5").groups] == [5, 5]


def test_section_overrides_the_top_for_its_role_only(load) -> None:
    groups = load("max_num_seqs: 5\ndecode: {max_num_seqs: 9}").groups
    assert [(group.role, group.max_num_seqs) for group in groups] == [("prefill", 5), ("decode", 9)]


def test_list_makes_several_groups_with_ids_of_their_own(load) -> None:
    groups = load("prefill: [{numa_node: 0}, {numa_node: 1}]").groups
    assert [(group.worker_id, group.numa_node) for group in groups] == [
        ("prefill-0", 0),
        ("prefill-1", 1),
        ("decode-0", -1),
    ]


def test_every_step_of_the_precedence(load) -> None:
    text = "max_num_seqs: 1\nprefill: {max_num_seqs: 2}"
    environ = {"ISTHMUS_MAX_NUM_SEQS": "3"}
    role_environ = {**environ, "ISTHMUS_PREFILL_MAX_NUM_SEQS": "4"}
    flag, role_flag = ("--max-num-seqs", "5"), ("--prefill-max-num-seqs", "6")
    found = [
        load(text).groups[0].max_num_seqs,
        load(text, environ=environ).groups[0].max_num_seqs,
        load(text, environ=role_environ).groups[0].max_num_seqs,
        load(text, *flag, environ=role_environ).groups[0].max_num_seqs,
        load(text, *flag, *role_flag, environ=role_environ).groups[0].max_num_seqs,
    ]
    assert found == [2, 3, 4, 5, 6]


def test_origin_of_each_setting_is_kept(load) -> None:
    config = load("max_num_seqs: 1", "--block-size", "512", environ={"ISTHMUS_DTYPE": "float32"})
    origins = config.origins["decode-0"]
    assert (origins["block_size"], origins["dtype"], origins["ranks"]) == ("flag", "environment", "default")
    assert origins["max_num_seqs"].endswith("cluster.yaml")


def test_host_and_port_are_the_routers(load) -> None:
    config = load("port: 9000\nrouter: {host: 0.0.0.0}", environ={"ISTHMUS_PORT": ""})
    assert (config.router.host, config.router.port, config.groups[0].port) == ("0.0.0.0", 9000, 0)
    assert config.router.url == "http://127.0.0.1:9000"


def test_port_flag_wins_over_environment_and_file(load) -> None:
    assert load("port: 1", "--port", "3", environ={"ISTHMUS_PORT": "2"}).router.port == 3
    assert load("port: 1", environ={"ISTHMUS_PORT": "2"}).router.port == 2


def test_router_accepts_the_command_line_it_is_started_with(load, model: str) -> None:
    config = load("router: {max_queue: 7, default_thinking: true, log_level: warning}", "--router-max-retries", "4")
    flags = router_flags(config, prefill=["http://127.0.0.1:1"], decode=["http://127.0.0.1:2"])
    seen = router_config.load(flags, {})
    assert (seen.max_queue, seen.default_thinking, seen.log_level, seen.max_retries) == (7, True, "warning", 4)
    assert (seen.model, seen.model_name, seen.prefill) == (model, "some-model", ("http://127.0.0.1:1",))


def test_false_option_reaches_the_router_as_false(load) -> None:
    config = load("router: {default_thinking: false}")
    flags = router_flags(config, prefill=["http://p"], decode=["http://d"])
    assert router_config.load(flags, {"ISTHMUS_DEFAULT_THINKING": "true"}).default_thinking is False


def test_environment_wins_over_the_files_router_section(load) -> None:
    environ = {"ISTHMUS_MAX_QUEUE": "9"}
    config = load("router: {max_queue: 7}", environ=environ)
    flags = router_flags(config, prefill=["http://p"], decode=["http://d"])
    assert router_config.load(flags, environ).max_queue == 9


def test_model_is_absolute_and_gives_the_served_name(load, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(model).parent)
    config = load("model: some-model")
    assert (config.model, config.served_model_name) == (model, "some-model")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("prefil: {}", "prefil (FILE): no such setting; did you mean prefill?"),
        ("prefill: 3", "prefill (FILE): wanted a mapping of settings, or a list with one mapping per group"),
        ("decode: []", "decode (FILE): wanted a mapping of settings, or a list with one mapping per group"),
        ("decode: {rank: 2}", "rank (FILE, decode): no such setting; did you mean ranks?"),
        ("router: {port: x}", "port = 'x' (FILE, router): wanted a whole number from 1 to 65535"),
        ("router: {max_queu: 1}", "max_queu (FILE, router): no such setting; did you mean max_queue?"),
        ("router: {max_queue: 0}", "router (FILE): max_queue: 0 must be above 0"),
        ("supervisor: {max_restart: 1}", "max_restart (FILE, supervisor): no such setting; did you mean max_restarts?"),
        ("supervisor: {max_restarts: -1}", "max_restarts = -1 (FILE, supervisor): wanted a number of at least 0"),
        (
            "transport: carrier-pigeon",
            "transport = 'carrier-pigeon' (FILE): wanted one of auto, nixl, host, ucxx, local",
        ),
        (
            "prefill: {block_size: 128}",
            "block_size: prefill-0 has 128, decode-0 has 256; one could not read the other's cache: "
            "set block_size once, at the top of the file",
        ),
        (
            "decode: {load_format: synthetic}",
            "load_format: prefill-0 has 'auto', decode-0 has 'synthetic'; one could not read the other's cache: "
            "set load_format once, at the top of the file",
        ),
        (
            "prefill: [{worker_id: a}, {worker_id: a}]",
            "worker_id = 'a': used by two groups; leave it out, or name each group once",
        ),
        (
            "prefill: {worker_id: ../a}",
            "worker_id = '../a' (FILE, prefill): names log files; wanted letters, digits, `_`, `-` and `.`, the "
            "first a letter or digit",
        ),
    ],
)
def test_refusal_names_the_place_and_the_remedy(load, tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == wanted.replace("FILE", str(tmp_path / "cluster.yaml"))


@pytest.mark.parametrize("text", ["model: [", "- 1", "model: m\n\tx: 1"])
def test_file_that_is_no_mapping_is_one_line_of_error(load, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text + "\n# model:")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "model: m\ndevice:cpu\ndtype: float32",
            ", line 3: not YAML: could not find expected ':' (while scanning a simple key, line 2)",
        ),
        ("model: m\n\tx: 1", ", line 2: not YAML: found character '\\t' that cannot start any token"),
    ],
)
def test_syntax_error_names_its_line(load, tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).startswith(f"{tmp_path / 'cluster.yaml'}{wanted}")


@pytest.mark.parametrize("read", [lambda path: load_cluster_config(argparse.Namespace(config=path), {}), read_settings])
def test_file_that_is_no_text_is_named(tmp_path: Path, read) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"model: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml: not text in UTF-8: .* at byte 10"):
        read(str(path))


def test_missing_model_folder_names_what_was_looked_for(load) -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/config\.json does not exist; wanted a folder"):
        load("model: /nowhere")


def test_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: can't be read"):
        load_cluster_config(argparse.Namespace(config="absent.yaml"), {})


def test_built_in_file_serves_the_tiny_model_exactly(tmp_path: Path) -> None:
    config = load_cluster_config(argparse.Namespace(config=""), {"XDG_CACHE_HOME": str(tmp_path)})
    assert config.served_model_name == "dsv4-tiny"
    assert {(group.dtype, group.kv_cache_dtype, group.transport) for group in config.groups} == {
        ("float32", "fp32", "auto")
    }
    assert [group.numa_node for group in config.groups] == [0, 1]


def test_model_flag_keeps_the_built_in_precision(model: str) -> None:
    config = load_cluster_config(argparse.Namespace(config="", model=model), {})
    assert (config.groups[0].dtype, config.groups[0].kv_cache_dtype) == ("float32", "fp32")


def test_rtx_file_is_four_ranks_on_each_node(model: str) -> None:
    config = load_cluster_config(argparse.Namespace(config=str(ROOT / "deploy/rtx-pro-6000-x8.yaml"), model=model), {})
    assert [(g.role, g.ranks, g.numa_node, g.device) for g in config.groups] == [
        ("prefill", 4, 0, "cuda"),
        ("decode", 4, 1, "cuda"),
    ]


def test_requests_wait_longer_for_a_worker_where_it_is_started_again():
    flags = ["--model", "m", "--prefill", "http://p", "--decode", "http://d"]
    by_hand, supervised = (
        router_config.load(flags, environ).resume_timeout_s for environ in ({}, router_environment({}))
    )
    assert by_hand < 7 < supervised
    chosen = {"ISTHMUS_RESUME_TIMEOUT_S": "9"}
    assert router_config.load(flags, router_environment(chosen)).resume_timeout_s == 9
    assert router_config.load([*flags, "--resume-timeout-s", "8"], router_environment(chosen)).resume_timeout_s == 8
