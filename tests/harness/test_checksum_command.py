"""`kvchaos checksum` and `kvchaos payload decode`, called as the command line calls them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from engine.checksum.payload import Payload, PayloadGroup, PayloadInvalid, encode
from harness.commands.checksum import PathUnavailable, checksum
from harness.commands.payload import payload
from harness.dump import DumpError

VECTORS = Path(__file__).parents[1] / "vectors"
CASES = sorted(VECTORS.glob("*.npz"))
INTEROP = json.loads((VECTORS.parents[1] / "docs" / "interop" / "checksums.json").read_text())["vectors"]
SHARED = json.loads((VECTORS / "payloads.json").read_text())


def run(command, *arguments, stdin=None):
    """The standard output of a command that ends well; its error is raised."""
    result = CliRunner().invoke(command, list(map(str, arguments)), input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.req("DEF-3", "DEF-4", "DEF-8")
@pytest.mark.parametrize("computed_by", ["definition", "torch", "cpu"])
def test_json_of_every_shared_vector(computed_by):
    for case in CASES:
        with np.load(case, allow_pickle=False) as arrays:
            expected = {"checksums": [f"0x{int(value):016x}" for value in arrays["checksums"]]}
        assert json.loads(run(checksum, case, "--path", computed_by, "--json")) == expected, case
    assert len(CASES) == 32


@pytest.mark.req("DEF-3", "DEF-4", "DEF-8", "HRD-1")
@pytest.mark.parametrize("computed_by", ["definition", "torch", "cpu"])
def test_both_versions_of_every_vector_of_the_interoperability_kit(computed_by, tmp_path):
    for vector in INTEROP:
        about = vector["arguments"]
        kv = np.frombuffer(bytes.fromhex(vector["kv"]), np.uint8)
        kv = kv.reshape(len(about["layers"]), about["heads"], -1, about["bytes_per_token"])
        numbers = {name: about[name] for name in ("first_head", "block_size", "first_token", "num_tokens")}
        np.savez(tmp_path / "dump.npz", kv=kv, layer_numbers=about["layers"], **numbers)
        for version, expected in vector["checksums"].items():
            got = run(checksum, tmp_path / "dump.npz", "--path", computed_by, "--version", version, "--json")
            assert json.loads(got)["checksums"] == [f"0x{value}" for value in expected], vector["name"]


@pytest.mark.req("HRD-1")
def test_the_paths_agree_on_version_2_of_every_shared_vector():
    for case in CASES:
        by_definition, *others = (
            run(checksum, case, "--path", path, "--version", 2) for path in ("definition", "torch", "cpu")
        )
        assert others == [by_definition] * 2
        assert by_definition != run(checksum, case) or "0x0000000000000000" in by_definition, case


def test_the_triton_kernel_has_no_version_2():
    with pytest.raises(PathUnavailable, match="version 1 only: use another --path"):
        run(checksum, CASES[0], "--path", "triton", "--version", 2)


@pytest.mark.req("DEF-3", "DEF-4", "DEF-8", "EXT-6")
def test_triton_agrees_in_its_interpreter():
    """In one process that runs the command for every vector, as the command itself starts one a dump."""
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    code = """if True:
        import sys
        from click.testing import CliRunner
        from harness.commands.checksum import PathUnavailable, checksum
        for case in sys.argv[1:]:
            result = CliRunner().invoke(checksum, [case, "--path", "triton", "--json"], catch_exceptions=False)
            assert result.exit_code == 0, result.output
            print(result.stdout, end="")
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, CASES)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for case, line in zip(CASES, done.stdout.splitlines(), strict=True):
        with np.load(case, allow_pickle=False) as arrays:
            assert json.loads(line)["checksums"] == [f"0x{int(value):016x}" for value in arrays["checksums"]], case


def test_triton_starts_its_interpreter_where_there_is_no_gpu():
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    case = VECTORS / "case_021.npz"
    assert run(checksum, case, "--path", "triton") == run(checksum, case)


def test_a_large_dump_is_not_interpreted(tmp_path):
    pytest.importorskip("triton", reason="Triton is not made for this platform")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("with a GPU no dump is too large")
    numbers = {"first_head": 0, "block_size": 1, "first_token": 0, "num_tokens": 513}
    np.savez(tmp_path / "large.npz", kv=np.zeros((1, 1, 513, 8), np.uint8), layer_numbers=[0], **numbers)
    with pytest.raises(PathUnavailable, match=r"513 blocks of one layer each are more than the 512 .*another --path"):
        run(checksum, tmp_path / "large.npz", "--path", "triton")


def test_text_has_a_position_and_a_checksum_a_line():
    lines = run(checksum, VECTORS / "case_021.npz").splitlines()
    assert lines == [f"7  {8976802738179963236:#018x}", f"8  {14345192521130963147:#018x}"]


def test_a_bad_file_is_our_error():
    with pytest.raises(DumpError, match="no such file"):
        run(checksum, "none.npz")


def test_help_names_what_it_takes():
    text = run(checksum, "--help")
    for word in ("kv", "layer_numbers", "first_head", "block_size", "first_token", "num_tokens", "--path", "--json"):
        assert word in text
    assert "decode" in run(payload, "--help")
    assert "--max-tokens" in run(payload, "decode", "--help")


def test_torch_is_imported_only_where_it_is_used():
    code = "import sys, harness.commands.checksum, harness.commands.payload; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.req("WIR-1")
@pytest.mark.parametrize("case", SHARED["valid"], ids=range(len(SHARED["valid"])))
def test_decode_prints_the_fields(case):
    expected = {"version": 1, **{key: case[key] for key in ("tp_size", "num_tokens", "groups")}}
    assert json.loads(run(payload, "decode", case["wire"], "--json")) == expected
    assert json.loads(run(payload, "decode", "-", "--json", stdin=case["wire"] + "\n")) == expected
    assert json.loads(run(payload, "decode", "-", "--json", stdin=case["wire"])) == expected


def test_decode_as_text():
    text = encode(Payload(2, 40, (PayloadGroup(3, 255, 16, 1, np.array([1, 2**64 - 1], dtype=np.uint64)),)))
    assert run(payload, "decode", text).splitlines() == [
        "version 1",
        "tp_size 2",
        "num_tokens 40",
        "group 3: fingerprint 0x00000000000000ff, block_size 16, start 1, values 2",
        "  1  0x0000000000000001",
        "  2  0xffffffffffffffff",
    ]


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize("case", SHARED["invalid"], ids=lambda case: case["why"])
def test_decode_refuses(case):
    for arguments in ({}, {"stdin": case["wire"] + "\n"}):
        with pytest.raises(PayloadInvalid, match=r"^payload: "):
            run(payload, "decode", "-" if arguments else case["wire"], **arguments)


@pytest.mark.req("WIR-2")
@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (SHARED["valid"][0]["wire"] + "\n\n", "not standard padded base64"),
        (b"\xff\xfe", "not ASCII"),
        (b"A" * 10**6, "characters are more than"),
    ],
    ids=["two newlines", "not text", "too long"],
)
def test_decode_refuses_on_standard_input(stdin, says):
    with pytest.raises(PayloadInvalid, match=says):
        run(payload, "decode", "-", "--max-tokens", 4096, stdin=stdin)


@pytest.mark.req("WIR-2")
def test_max_tokens_bounds_the_request():
    wire = SHARED["valid"][1]["wire"]
    assert "num_tokens 640" in run(payload, "decode", wire, "--max-tokens", 640)
    with pytest.raises(PayloadInvalid, match="num_tokens is 640, outside 1 to 639"):
        run(payload, "decode", wire, "--max-tokens", 639)
