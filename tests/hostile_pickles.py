"""Opcodes that would run code, exhaust memory or make no sense, as files that torch might load.

Written opcode by opcode: nothing here is serialized, nothing may ever be run.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

HEAD = b"\x80\x02"
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
COMMAND = "touch {place}/ran"


def text(words: str) -> bytes:
    """A text on the stack."""
    return b"X" + struct.pack("<I", len(words.encode())) + words.encode()


def name(whole: str) -> bytes:
    """A name of code on the stack."""
    module, _, last = whole.rpartition(".")
    return f"c{module}\n{last}\n".encode()


def called(whole: str, place: Path) -> dict[str, bytes]:
    """A call with a command, in the four ways that there are."""
    command = text(COMMAND.format(place=place))
    return {
        f"{whole}, called": name(whole) + command + b"\x85R",
        f"{whole}, made": name(whole) + command + b"\x85\x81",
    }


def inside(value: bytes) -> bytes:
    """A dump with a value where a sample should be."""
    return text("rollout_id") + b"K\x05" + text("samples") + b"](" + value + b"e"


def calls(place: Path) -> Iterator[tuple[str, bytes]]:
    """Calls alone, in a sample, and in a field of a sample."""
    for n, whole in enumerate(NAMES):
        for label, call in called(whole, place).items():
            yield label, HEAD + b"}(" + text("rollout_id") + call + b"u."
        if n % 2:
            yield (
                f"{whole}, sample",
                HEAD + b"}(" + inside(called(whole, place)[f"{whole}, called"]) + b"u.",
            )
    system = called("os.system", place)["os.system, called"]
    field = b"}(" + text("tokens") + b"]" + text("metadata") + system + b"u"
    yield "in a field", HEAD + b"}(" + inside(field) + b"u."
    yield "as a key", HEAD + b"}(" + text("rollout_id") + b"K\x01" + system + b"K\x01u."
    yield "at the top", HEAD + text("rollout_id") + b"0" + system + b"."
    yield (
        "nested",
        HEAD
        + text("rollout_id")
        + b"0"
        + name("builtins.map")
        + b"("
        + name("os.system")
        + b"]("
        + text("touch " + str(place / "ran"))
        + b"etR.",
    )
    yield (
        "call of a call",
        HEAD
        + text("rollout_id")
        + b"0"
        + name("builtins.getattr")
        + b"("
        + name("os.path")
        + text("system")
        + b"tR"
        + text(f"touch {place}/ran")
        + b"\x85R.",
    )
    yield (
        "by two texts",
        b"\x80\x04"
        + text("rollout_id")
        + b"0"
        + text("os")
        + text("system")
        + b"\x93"
        + text(f"touch {place}/ran")
        + b"\x85R.",
    )
    yield (
        "state of a stranger",
        HEAD
        + text("rollout_id")
        + b"0"
        + name("os.environ")
        + b")\x81}("
        + text("__setstate__")
        + name("os.system")
        + b"ub.",
    )
    yield "state of a list", HEAD + text("rollout_id") + b"0](K\x01e}b."


def nonsense(place: Path) -> Iterator[tuple[str, bytes]]:
    """Opcodes of old, of extensions, and those that end too early or take too much."""
    start = HEAD + text("rollout_id") + b"0"
    system = f"touch {place}/ran"
    yield "instance", start + b"(" + text(system) + b"ios\nsystem\n."
    yield "object", start + b"(" + name("os.system") + text(system) + b"o."
    yield "extension", start + b"\x82\x01."
    yield "persistent by line", start + b"P../../etc/passwd\n."
    yield "bytearray", start + b"\x96" + struct.pack("<Q", 2**40) + b"."
    yield "next buffer", start + b"\x97."
    yield "text int", start + b"I99\n."
    yield "frozen set", b"\x80\x04" + start + b"(K\x01\x91."
    yield "ends early", start
    yield "empty", b""
    yield "a number only", start + b"K\x05."
    yield "long text", start + b"\x8d" + struct.pack("<Q", 2**62) + b"a."
    yield "long bytes", start + b"\x8e" + struct.pack("<Q", 2**63) + b"a."
    yield "long number", start + b"\x8b" + struct.pack("<i", 2**30) + b"1."
    yield "negative number", start + b"\x8b" + struct.pack("<i", -5) + b"1."
    yield "note never made", start + b"h\x07."
    yield "no mark", start + b"e."
    yield "pops too often", start + b"00000."
    yield "key that is a list", start + b"}]K\x01s."
    yield "key that is a deep tuple", start + b"}" + b")" + b"\x85" * 100_000 + b"K\x01s."
    yield "call of a number", start + b"K\x01)R."
    yield (
        "storage with a path",
        HEAD + b"}" + text("rollout_id") + stored("../../../etc/passwd", 8, 8) + b"s.",
    )
    yield (
        "storage of a link",
        HEAD + b"}" + text("rollout_id") + stored("/etc/passwd", 8, 8) + b"s.",
    )
    yield (
        "tensor beyond its numbers",
        HEAD + b"}" + text("rollout_id") + stored("0", 8, 2**30) + b"s.",
    )
    yield (
        "tensor without strides",
        HEAD + b"}" + text("rollout_id") + stored("0", 8, 2**30, 0) + b"s.",
    )
    yield (
        "tensor of a strange kind",
        HEAD + b"}" + text("rollout_id") + stored("0", 8, 8, kind="QInt8Storage") + b"s.",
    )
    yield "list in itself", start + b"]q\x00(h\x00h\x00e."
    yield "dictionary in itself", start + b"}q\x00K\x01h\x00s."
    yield "nested lists", start + b"]" * 300_000 + b"a" * 299_999 + b"."
    yield "laughs", start + laughs(200)
    yield "laughs in samples", HEAD + b"}(" + inside(laughs(60)[:-1] + b"h\x00" * 2000) + b"u."
    yield (
        "repeated notes",
        start
        + b"]q\x00"
        + b"".join(b"r" + struct.pack("<I", n) for n in range(2**31, 2**31 + 5000))
        + b".",
    )
    yield (
        "copies of a long text",
        start
        + text("a" * 100_000)
        + b"q\x00"
        + (b"c_codecs\nencode\nh\x00" + text("latin1") + b"\x86R") * 5000
        + b".",
    )
    yield (
        "copies of a long size",
        start + b"(" + b"K\x01" * 50_000 + b"tq\x000" + (b"ctorch\nSize\nh\x00\x85R") * 5000 + b".",
    )
    yield "a billion marks", start + b"(" * 500_000 + b"."


def laughs(depth: int) -> bytes:
    """A list that holds the one before it ten times, and so on."""
    made = b"](K\x01eq\x00"
    for n in range(depth):
        made += (
            b"]("
            + b"h"
            + bytes([n % 256])
            + (b"h" + bytes([n % 256])) * 9
            + b"eq"
            + bytes([(n + 1) % 256])
        )
    return made + b"."


def stored(key: str, size: int, length: int, stride: int = 1, kind: str = "FloatStorage") -> bytes:
    """A tensor in a member of the archive."""
    storage = b"(" + text("storage") + name(f"torch.{kind}") + text(key) + text("cpu")
    storage += b"J" + struct.pack("<i", size) + b"tQ"
    shape = b"J" + struct.pack("<i", length) + b"\x85" + b"J" + struct.pack("<i", stride) + b"\x85"
    rest = b"\x89" + name("collections.OrderedDict") + b")R"
    return (
        name("torch._utils._rebuild_tensor_v2") + b"(" + storage + b"K\x00" + shape + rest + b"tR"
    )


def archive(path: Path, data: bytes, *, compress: bool = False, main: str = "a/data.pkl") -> Path:
    """A file as torch saves it, around any opcodes."""
    way = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", way) as out:
        out.writestr(main, data)
        out.writestr("a/byteorder", "little")
        out.writestr("a/data/0", bytes(32))
        out.writestr("a/version", "3\n")
    return path
