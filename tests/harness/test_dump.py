"""Dumps from elsewhere: read exactly, or refused in one line that names the file and the trouble."""

import io
import random
import tracemalloc
import zipfile

import numpy as np
import pytest

from engine.errors import EXIT_USAGE, InputError
from harness.dump import DumpError, load_dump

ARRAYS = {
    "kv": np.arange(2 * 3 * 4 * 16, dtype=np.uint64).astype(np.uint8).reshape(2, 3, 4, 16),
    "layer_numbers": np.array([4, 9]),
    "first_head": np.int64(5),
    "block_size": np.int64(2),
    "first_token": np.int64(6),
    "num_tokens": np.int64(9),
    "checksums": np.zeros(2, np.uint64),
}


def write(path, save=np.savez, **changes):
    """Write the good dump with some arrays replaced (None: left out)."""
    save(path, **{key: array for key, array in (ARRAYS | changes).items() if array is not None})
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_what_was_written(tmp_path, save):
    dump = load_dump(write(tmp_path / "d.npz", save))
    assert dump.kv.dtype == np.uint8
    assert dump.kv.tolist() == ARRAYS["kv"].tolist()
    assert (dump.layer_numbers, dump.first_head, dump.block_size) == ((4, 9), 5, 2)
    assert (dump.first_token, dump.num_tokens, dump.first_block) == (6, 9, 3)


@pytest.mark.parametrize("change", ["fortran", "big_endian", "no_checksums"])
def test_reads_other_ways_to_write_the_same(tmp_path, change):
    changes = {
        "fortran": {"kv": np.asfortranarray(ARRAYS["kv"])},
        "big_endian": {"layer_numbers": np.array([4, 9], ">i4"), "first_head": np.uint16(5)},
        "no_checksums": {"checksums": None},
    }
    dump = load_dump(write(tmp_path / "d.npz", **changes[change]))
    assert dump.kv.tolist() == ARRAYS["kv"].tolist()
    assert (dump.layer_numbers, dump.first_head) == ((4, 9), 5)


def refused(path, says, **arguments):
    with pytest.raises(DumpError, match=says) as caught:
        load_dump(path, **arguments)
    assert isinstance(caught.value, InputError)
    assert caught.value.exit_code == EXIT_USAGE
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv": None}, "no kv in it"),
        ({"block_size": None, "num_tokens": None}, "no block_size, num_tokens in it"),
        ({"kv": ARRAYS["kv"].astype(np.int8)}, "kv is int8"),
        ({"kv": ARRAYS["kv"].astype(np.float32)}, "kv is float32: it must be uint8"),
        ({"kv": np.array([{}], dtype=object)}, "kv is object: it must be uint8"),
        ({"kv": ARRAYS["kv"][0]}, r"kv is uint8 \[3, 4, 16\]"),
        ({"kv": ARRAYS["kv"][:, :0]}, "none 0"),
        ({"kv": ARRAYS["kv"][..., :12]}, "bytes_per_token is 12"),
        ({"layer_numbers": np.array(4)}, "one a layer"),
        ({"layer_numbers": np.array([4.0, 9.0])}, "layer_numbers is float64: it must be integers"),
        ({"layer_numbers": np.array([4])}, "1 for 2 layers"),
        ({"layer_numbers": np.array([4, 4])}, "not distinct"),
        ({"layer_numbers": np.array([-4, 4])}, "negative"),
        ({"first_head": np.array([5])}, "first_head is an array"),
        ({"first_head": np.bool_(True)}, "first_head is bool"),
        ({"first_head": np.array("five")}, "first_head is <U4"),
        ({"first_head": np.int64(2**16)}, "heads 65536"),
        ({"block_size": np.int64(0)}, "block_size is 0"),
        ({"block_size": np.int64(-2)}, "block_size is -2"),
        ({"block_size": np.int64(3)}, "not whole blocks of 3"),
        ({"block_size": np.int64(2**62)}, "not whole blocks"),
        ({"first_token": np.int64(7)}, "first_token is 7"),
        ({"first_token": np.int64(-2)}, "first_token is -2"),
        ({"num_tokens": np.int64(-1)}, "num_tokens is -1"),
        ({"num_tokens": np.int64(11)}, "num_tokens is 11, but its kv ends at token 10"),
    ],
)
def test_refuses_arrays_that_are_not_a_dump(tmp_path, changes, says):
    refused(write(tmp_path / "d.npz", **changes), says)


def test_refuses_what_is_not_an_archive(tmp_path):
    refused(tmp_path / "none.npz", "no such file")
    refused(tmp_path, "cannot be read")
    (tmp_path / "text.npz").write_text("hello")
    refused(tmp_path / "text.npz", "not an .npz archive")
    (tmp_path / "empty.npz").touch()
    refused(tmp_path / "empty.npz", "not an .npz archive")
    np.save(tmp_path / "array.npy", ARRAYS["kv"])
    refused(tmp_path / "array.npy", "not an .npz archive")
    with zipfile.ZipFile(tmp_path / "nothing.npz", "w"):
        pass
    refused(tmp_path / "nothing.npz", "no kv, layer_numbers")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_refuses_every_cut(tmp_path, save):
    whole = write(tmp_path / "d.npz", save).read_bytes()
    cut = tmp_path / "cut.npz"
    for length in range(0, len(whole), 37):
        cut.write_bytes(whole[:length])
        refused(cut, "not an .npz archive, or cut short")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_refused_or_reads_the_same(tmp_path, save):
    """A changed byte may hit something that no value depends on; it never gives other values or another error."""
    whole = write(tmp_path / "d.npz", save).read_bytes()
    path = tmp_path / "damaged.npz"
    rng = random.Random(1)
    refusals = 0
    for _ in range(1500):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            dump = load_dump(path)
        except DumpError:
            refusals += 1
            continue
        assert dump.kv.tolist() == ARRAYS["kv"].tolist()
        assert (dump.layer_numbers, dump.first_head, dump.block_size) == ((4, 9), 5, 2)
        assert (dump.first_token, dump.num_tokens) == (6, 9)
    assert refusals > 500


def npy(header, data=b""):
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def with_member(path, key, content):
    """The good dump with the bytes of one member replaced."""
    write(path, **{key: None})
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{key}.npy", content)
    return path


HEADER = "{'descr': '|u1', 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not numpy",
        npy(HEADER % "(1, 1, 1099511627776, 8)", bytes(64)),
        npy(HEADER % "(2, 3, 4, 16)", bytes(383)),
        npy(HEADER % "(2, 3, 4, 16)", bytes(385)),
        npy(HEADER % "(-2, -3, 4, 16)", bytes(384)),
        npy(HEADER % "(2L, 3L, 4L, 16L)", bytes(384)),
        npy(HEADER % ("(" * 400), bytes(384)),
        npy(HEADER % "__import__('os')", bytes(384)),
        npy("{" + " " * 60000 + "}", bytes(384)),
        b"\x93NUMPY\x09\x00" + npy(HEADER % "(2, 3, 4, 16)", bytes(384))[8:],
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_refuses_members_that_are_not_what_they_say(tmp_path, content):
    refused(with_member(tmp_path / "d.npz", "kv", content), "kv is damaged")


def test_an_archive_that_unpacks_to_too_much_is_refused_before_it_is_unpacked(tmp_path):
    path = with_member(tmp_path / "bomb.npz", "kv", npy(HEADER % "(1, 1, 8388608, 8)", bytes(2**26)))
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    try:
        refused(path, "declares 671.* bytes of arrays, more than 1000000", max_bytes=10**6)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_an_archive_that_lies_about_its_sizes_is_refused(tmp_path):
    """The central directory says 8 GiB where 64 bytes are stored, and the other way round."""
    path = with_member(tmp_path / "lie.npz", "kv", npy(HEADER % "(2, 3, 4, 16)", bytes(384)))
    data = path.read_bytes()
    at = data.rindex(b"kv.npy") - 46
    for size, says in ((2**32 - 2, "declares 429496.* bytes"), (64, "kv is damaged")):
        changed = data[: at + 24] + size.to_bytes(4, "little") + data[at + 28 :]
        path.write_bytes(changed)
        refused(path, says)


def test_a_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was loaded",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    refused(with_member(tmp_path / "d.npz", "num_tokens", buffer.getvalue()), "num_tokens is object")
