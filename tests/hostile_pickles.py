"""Opcodes that would run code, exhaust memory or make no sense, as files that torch might load.

Written opcode by opcode: nothing here is serialized, nothing may ever be run.
"""

from __future__ import annotations

import struct
import zipfile
from itertools import pairwise
from pathlib import Path

HEAD = b"\x80\x02"
COMMAND = "touch ran"
NAMES = (
    "os.system",
    "posix.system",
    "nt.system",
    "subprocess.Popen",
    "subprocess.check_output",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "builtins.getattr",
    "builtins.__import__",
    "builtins.compile",
    "__builtin__.eval",
    "importlib.import_module",
    "runpy.run_path",
    "pty.spawn",
    "socket.socket",
    "shutil.rmtree",
    "ctypes.CDLL",
    "webbrowser.open",
    "code.interact",
    "timeit.timeit",
    "cProfile.run",
    "pydoc.pipepager",
    "bdb.Bdb.run",
    "operator.attrgetter",
    "functools.partial",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "torch._dynamo.guards.GuardBuilder.get",
    "torch.storage._load_from_bytes",
    "numpy.testing._private.utils.runstring",
    "numpy.load",
    "pickle.loads",
    "_pickle.loads",
    "marshal.loads",
    "types.CodeType",
    "types.FunctionType",
    "asyncio.unix_events._UnixSubprocessTransport._start",
    "multiprocessing.util.spawnv_passfds",
    "urllib.request.urlopen",
)
pack = struct.pack


def text(words: str) -> bytes:
    """A text on the stack."""
    return b"X" + pack("<I", len(words.encode())) + words.encode()


def name(whole: str) -> bytes:
    """A name of code on the stack."""
    module, _, last = whole.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def called(whole: str) -> bytes:
    """A call of a name with a command."""
    return name(whole) + text(COMMAND) + b"\x85R"


def inside(value: bytes) -> bytes:
    """A dump with a value where a sample should be."""
    parts = text("rollout_id") + b"K\x05" + text("samples") + b"](" + value + b"e"
    return HEAD + b"}(" + parts + b"u."


def field(value: bytes) -> bytes:
    """A dump with a value where its number should be."""
    return HEAD + b"}" + text("rollout_id") + value + b"s."


def laughs(depth: int) -> bytes:
    """A list that holds the one before it ten times, and so on."""
    notes = [bytes([n % 256]) for n in range(depth + 1)]
    layers = (b"](" + (b"h" + a) * 10 + b"eq" + b for a, b in pairwise(notes))
    return b"](K\x01eq\x00" + b"".join(layers)


def stored(key: str, size: int, length: int, stride: int = 1, kind: str = "FloatStorage") -> bytes:
    """A tensor in a member of the archive."""
    storage = b"(" + text("storage") + name(f"torch.{kind}") + text(key) + text("cpu")
    storage += b"J" + pack("<i", size) + b"tQ"
    shape = b"J" + pack("<i", length) + b"\x85J" + pack("<i", stride) + b"\x85"
    rest = b"\x89" + name("collections.OrderedDict") + b")R"
    return (
        name("torch._utils._rebuild_tensor_v2") + b"(" + storage + b"K\x00" + shape + rest + b"tR"
    )


# A name to be recognized by, and then nothing but the value that follows.
START = HEAD + text("rollout_id") + b"0"
SYSTEM, RUN = name("os.system"), text(COMMAND) + b"\x85R."
GETATTR, OS = name("builtins.getattr"), name("os.path")
FIELDS = text("tokens") + b"]" + text("metadata") + called("os.system")

CALLS = {
    **{f"{whole}, called": field(called(whole)) for whole in NAMES},
    **{f"{whole}, made": field(called(whole)[:-1] + b"\x81") for whole in NAMES},
    **{f"{whole}, sample": inside(called(whole)) for whole in NAMES[1::2]},
    "in a field": inside(b"}(" + FIELDS + b"u"),
    "as a key": HEAD + b"}(" + text("rollout_id") + b"K\x01" + called("os.system") + b"K\x01u.",
    "at the top": START + SYSTEM + RUN,
    "nested": START + name("builtins.map") + b"(" + SYSTEM + b"](" + text(COMMAND) + b"etR.",
    "call of a call": START + GETATTR + b"(" + OS + text("system") + b"tR" + RUN,
    "by two texts": START + text("os") + text("system") + b"\x93" + RUN,
    "state of a stranger": START
    + (name("os.environ") + b")\x81}(" + text("__setstate__") + SYSTEM + b"ub."),
    "state of a list": START + b"](K\x01e}b.",
}

NONSENSE = {
    "instance": START + b"(" + text(COMMAND) + b"ios\nsystem\n.",
    "object": START + b"(" + SYSTEM + text(COMMAND) + b"o.",
    "extension": START + b"\x82\x01.",
    "persistent by line": START + b"P../../etc/passwd\n.",
    "bytearray": START + b"\x96" + pack("<Q", 2**40) + b".",
    "next buffer": START + b"\x97.",
    "text int": START + b"I99\n.",
    "frozen set": START + b"(K\x01\x91.",
    "ends early": START,
    "empty": b"",
    "a number only": START + b"K\x05.",
    "long text": START + b"\x8d" + pack("<Q", 2**62) + b"a.",
    "long bytes": START + b"\x8e" + pack("<Q", 2**63) + b"a.",
    "long number": START + b"\x8b" + pack("<i", 2**30) + b"1.",
    "negative number": START + b"\x8b" + pack("<i", -5) + b"1.",
    "note never made": START + b"h\x07.",
    "no mark": START + b"e.",
    "pops too often": START + b"00000.",
    "key that is a list": START + b"}]K\x01s.",
    "key that is a deep tuple": START + b"})" + b"\x85" * 100_000 + b"K\x01s.",
    "call of a number": START + b"K\x01)R.",
    "storage with a path": field(stored("../../../etc/passwd", 8, 8)),
    "storage of a link": field(stored("/etc/passwd", 8, 8)),
    "tensor beyond its numbers": field(stored("0", 8, 2**30)),
    "tensor without strides": field(stored("0", 8, 2**30, 0)),
    "tensor of a strange kind": field(stored("0", 8, 8, kind="QInt8Storage")),
    "list in itself": START + b"]q\x00(h\x00h\x00e.",
    "dictionary in itself": START + b"}q\x00K\x01h\x00s.",
    "nested lists": START + b"]" * 100_000 + b"a" * 99_999 + b".",
    "laughs": START + laughs(200) + b".",
    "laughs in samples": inside(laughs(60) + b"h\x00" * 2000),
    "many notes": START + b"]" + b"".join(b"r" + pack("<I", 2**31 + n) for n in range(5000)) + b".",
    "copies of a long text": START
    + (text("a" * 100_000) + b"q\x00")
    + (b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R") * 5000
    + b".",
    "copies of a long size": START
    + (b"(" + b"K\x01" * 50_000 + b"tq\x000" + b"ctorch\nSize\nh\x00\x85R" * 5000 + b"."),
    "many marks": START + b"(" * 100_000 + b".",
}


def archive(path: Path, data: bytes, *, compress: bool = False, main: str = "a/data.pkl") -> Path:
    """A file as torch saves it, around any opcodes."""
    way = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", way) as out:
        out.writestr(main, data)
        out.writestr("a/byteorder", "little")
        out.writestr("a/data/0", bytes(32))
        out.writestr("a/version", "3\n")
    return path
