"""The command line's frame: help at once, one line on bad input, exit statuses."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from windage.cli import main as frame
from windage.cli.common import seed
from windage.estimators.errors import BadInput, unknown

HEAVY = {"torch", "numpy", "scipy", "pandas", "pyarrow", "matplotlib", "jinja2", "rich"}


def windage(*words: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from windage.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def verb(monkeypatch):
    """Install a verb `probe` whose `run` is the given function."""

    def install(run):
        def configure(parser):
            parser.add_argument("--group-size", type=int)

        monkeypatch.setitem(frame.VERBS, "probe", "a verb of the tests")
        monkeypatch.setitem(
            sys.modules, "windage.cli.probe", SimpleNamespace(configure=configure, run=run)
        )

    return install


def refusal(capsys, *words: str) -> str:
    assert frame.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1 and output.err.endswith("\n")
    return output.err.rstrip()


def test_help_lists_the_verbs():
    answer = windage("--help")
    assert answer.returncode == 0 and answer.stderr == ""
    assert all(f"  {verb} " in answer.stdout for verb in frame.VERBS)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["nonsense"]])
def test_nothing_heavy_is_imported_to_answer(words):
    program = (
        "import sys\nfrom windage.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print('\\n'.join(sys.modules))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True
    )
    assert "windage.cli.main" in answer.stdout.split()
    assert HEAVY.isdisjoint(answer.stdout.split())


@pytest.mark.parametrize("name", sorted(frame.VERBS))
def test_a_verb_is_listed_with_its_module_and_imports_nothing_heavy(name):
    program = (
        f"import sys, windage.cli.{name} as verb\n"
        "assert callable(verb.configure) and callable(verb.run)\n"
        "print('\\n'.join(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert HEAVY.isdisjoint(answer.stdout.split())


def test_bad_words_are_refused_in_one_line(capsys, verb, tmp_path):
    verb(lambda arguments: 0)
    file = tmp_path / "file"
    file.touch()
    assert "nearest valid name: probe" in refusal(capsys, "prove")
    assert "allowed: " in refusal(capsys)
    assert "nearest valid name: --version" in refusal(capsys, "--vresion")
    assert refusal(capsys, "probe", "--grup-size=3").startswith(
        "windage probe: unknown flag '--grup-size'; nearest valid name: --group-size; allowed: "
    )
    assert "unknown flag '--group'" in refusal(capsys, "probe", "--group", "3")
    assert "unexpected argument 'stray'" in refusal(capsys, "probe", "stray")
    assert "--group-size" in refusal(capsys, "probe", "--group-size", "many")
    assert "0 to 2**63 - 1" in refusal(capsys, "probe", "--seed=-1")
    assert "is a file" in refusal(capsys, "probe", "--out", str(file / "below"))
    assert "is no path" in refusal(capsys, "probe", "--out", "")


def test_shared_flags_reach_the_verb(verb, tmp_path):
    seen = []
    verb(lambda arguments: seen.append(arguments) or 1)
    assert frame.main(["probe", "--json", "--seed", "7", "--out", str(tmp_path / "new")]) == 1
    assert (seen[0].json, seen[0].seed, seen[0].out) == (True, 7, tmp_path / "new")
    assert seed(str(2**63 - 1)) == 2**63 - 1


def test_bad_input_is_one_line_whatever_its_message(capsys, verb):
    def run(arguments):
        raise BadInput("problem.json:\n  key 'x'\r\n\tunknown")

    verb(run)
    assert refusal(capsys, "probe") == "windage probe: problem.json: key 'x' unknown"


def test_an_interrupt_exits_with_130(verb):
    def run(arguments):
        raise KeyboardInterrupt

    verb(run)
    assert frame.main(["probe"]) == 130


def test_a_reader_that_left_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    program = "import sys; from windage.cli.main import main; sys.exit(main(['--version']))"
    answer = subprocess.run(
        [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (141, "")


def test_a_full_disk_and_a_name_too_long_are_one_line(capsys, verb):
    program = "import sys; from windage.cli.main import main; sys.exit(main(['--version']))"
    with open("/dev/full", "w") as full:
        answer = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
    assert "No space left" in answer.stderr
    verb(lambda arguments: os.stat("x" * 5000))
    assert "File name too long" in refusal(capsys, "probe")


@pytest.mark.parametrize(
    ("name", "nearest"), [("GRPO", "grpo"), ("rlo", "rloo"), ("dr-grpo", "dr_grpo"), ("", "rloo")]
)
def test_the_nearest_name_is_offered(name, nearest):
    message = str(unknown("estimator", name, ["grpo", "rloo", "dr_grpo"]))
    assert f"nearest valid name: {nearest};" in message
    assert "none is allowed" in str(unknown("setting", name, []))
