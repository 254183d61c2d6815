"""Reading a dump: the KV of consecutive blocks of one request, as bytes, in a `.npz` file.

A dump comes from somewhere else (another engine, a bug report), so nothing in it is believed: no pickle is loaded, and
nothing is allocated before the sizes that the archive declares agree with each other and stay below a limit.
"""

from __future__ import annotations

import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.errors import InputError
from kernels import definition

MAX_DUMP_BYTES = 4 * 2**30

_KEYS = ("kv", "layer_numbers", "first_head", "block_size", "first_token", "num_tokens")
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    SyntaxError,
    MemoryError,
    struct.error,
    tokenize.TokenError,
    UserWarning,
    zipfile.BadZipFile,
    zlib.error,
)


class DumpError(InputError):
    """A file that is not a usable dump."""


@dataclass(frozen=True, slots=True, eq=False)
class Dump:
    """KV of consecutive whole blocks: what `kernels.definition.block_checksums` takes.

    Attributes:
        kv: uint8 [layers, heads, tokens, bytes_per_token].
        layer_numbers: one a layer, distinct.
        first_head: number of the first head, over the unsharded model.
        block_size: tokens a block.
        first_token: position in the request of the first token, at the start of a block.
        num_tokens: tokens of the request that count, from its first token.
    """

    kv: npt.NDArray[np.uint8]
    layer_numbers: tuple[int, ...]
    first_head: int
    block_size: int
    first_token: int
    num_tokens: int

    @property
    def first_block(self) -> int:
        """Block position in the request of the first block."""
        return self.first_token // self.block_size


def load_dump(path: Path, *, max_bytes: int = MAX_DUMP_BYTES) -> Dump:
    """Read a dump. Keys beyond those of `Dump` (such as stored `checksums`) are not looked at.

    Args:
        path: a `.npz` file with an array for each attribute of `Dump`.
        max_bytes: the most that its arrays may declare to hold, unpacked.

    Raises:
        DumpError: it is missing, damaged, too large, or not a dump.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = _read_arrays(archive, path, max_bytes)
    except FileNotFoundError as error:
        raise DumpError(f"{path}: no such file: give the path of a .npz dump") from error
    except zipfile.BadZipFile as error:
        raise DumpError(
            f"{path}: not an .npz archive, or cut short ({_reason(error)}): write the dump again"
        ) from error
    except OSError as error:
        raise DumpError(f"{path}: cannot be read ({error.strerror or error}): give a readable .npz file") from error
    except _UNREADABLE as error:
        raise DumpError(f"{path}: a damaged archive ({_reason(error)}): write the dump again") from error
    return _make_dump(arrays, path)


def _reason(error: Exception) -> str:
    """The first line of what another library says, for ours is one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _read_arrays(archive: zipfile.ZipFile, path: Path, max_bytes: int) -> dict[str, npt.NDArray[np.generic]]:
    names = set(archive.namelist())
    missing = [key for key in _KEYS if f"{key}.npy" not in names]
    if missing:
        raise DumpError(f"{path}: no {', '.join(missing)} in it: a dump needs the arrays {', '.join(_KEYS)}")
    declared = sum(archive.getinfo(f"{key}.npy").file_size for key in _KEYS)
    if declared > max_bytes:
        raise DumpError(
            f"{path}: declares {declared} bytes of arrays, more than {max_bytes}: dump fewer blocks or layers a file"
        )
    return {key: _read_array(archive, key, path) for key in _KEYS}


def _read_array(archive: zipfile.ZipFile, key: str, path: Path) -> npt.NDArray[np.generic]:
    """Read one member; numpy would allocate whatever its header claims, so the header has to fit the member first."""
    info = archive.getinfo(f"{key}.npy")
    try:
        with archive.open(info) as member, warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns of a header that it had to repair: not one of np.savez
            version = np.lib.format.read_magic(member)
            if version != (1, 0):
                raise ValueError(f"npy version {version} where np.savez writes (1, 0)")
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(member)
            if dtype.kind not in "iu":
                raise DumpError(f"{path}: {key} is {dtype}: it must be {'uint8' if key == 'kv' else 'integers'}")
            size = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or size != info.file_size - member.tell():
                raise ValueError(f"its header says {size} bytes, {info.file_size - member.tell()} are stored")
            data = member.read(size)
            member.read(1)  # reaches the end, where zipfile checks the CRC
            array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")
    except _UNREADABLE as error:
        raise DumpError(f"{path}: {key} is damaged ({_reason(error)}): write the dump again") from error
    return array


def _make_dump(arrays: dict[str, npt.NDArray[np.generic]], path: Path) -> Dump:
    scalars = {}
    for key in _KEYS[2:]:
        if arrays[key].shape != ():
            raise DumpError(f"{path}: {key} is an array {list(arrays[key].shape)}: it must be one integer")
        scalars[key] = int(arrays[key])
    if arrays["layer_numbers"].ndim != 1:
        raise DumpError(f"{path}: layer_numbers is {list(arrays['layer_numbers'].shape)}: it must be one a layer")
    layer_numbers = tuple(int(number) for number in arrays["layer_numbers"])
    kv: npt.NDArray[np.uint8] = arrays["kv"]  # type: ignore[assignment] # check_blocks tests its dtype
    try:
        definition.check_blocks(kv, layer_numbers, **scalars)
    except ValueError as error:
        raise DumpError(f"{path}: {error}") from error
    end = scalars["first_token"] + kv.shape[2]
    if scalars["num_tokens"] > end:
        raise DumpError(
            f"{path}: num_tokens is {scalars['num_tokens']}, but its kv ends at token {end}: dump all blocks"
        )
    return Dump(kv, layer_numbers, **scalars)
