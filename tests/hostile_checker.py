"""A worker whose checker believes everything: it works answers out, and does as it is told.

Run by `test_llm_verify.py` in the place of the real program.
"""

import ast
import math
import operator
import os
import sys
import time
from pathlib import Path

from windage.llm.verify_worker import Found, serve

OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.Pow: operator.pow}


def spin():
    while True:
        pass


def flood():
    while True:
        os.write(1, b"x" * 100_000)


def fork():
    for _ in range(3):
        if os.fork() == 0:
            time.sleep(60)


def open_many():
    return [open("/dev/null") for _ in range(1000)]


JOBS = {
    "sleep": lambda: time.sleep(60),
    "spin": spin,
    "memory": lambda: bytearray(10**11),
    "memory bit by bit": lambda: [bytearray(10**7) for _ in range(10**5)],
    "fork": fork,
    "write": lambda: Path(f"/tmp/hostile-{os.getpid()}").write_text("x"),
    "files": open_many,
    "exit": lambda: os._exit(0),
    "abort": os.abort,
    "stop": lambda: os.kill(os.getpid(), 19),
    "deaf": lambda: os.close(0),
    "dumb": lambda: os.close(1),
    "garbage": lambda: os.write(1, b"\xff\xfe not JSON\n"),
    "list": lambda: os.write(1, b"[1]\n"),
    "lie": lambda: os.write(1, b'{"word": "perfect"}\n'),
    "flood": flood,
    "recursion": lambda: (lambda f: f(f))(lambda f: f(f)),
    "system exit": lambda: sys.exit(3),
}


def worked_out(node):
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](worked_out(node.left), worked_out(node.right))
    if isinstance(node, ast.UnaryOp):
        return -worked_out(node.operand)
    return node.value


def believe(text, answer):
    if text in JOBS:
        JOBS[text]()
    elif text.endswith("!"):
        return Found("right" if math.factorial(int(text[:-1])) == int(answer) else "wrong")
    found = worked_out(ast.parse(text.replace("^", "**"), mode="eval").body)
    return Found("right" if found == int(answer) else "wrong")


if __name__ == "__main__":
    serve({"integer": believe})
