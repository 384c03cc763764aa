"""Equality by math-verify: its verdicts, and a child process that gives up in time and ends with its parent."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from rftdask.data.task import Task
from rftdask.rollouts.rewards import math_answer
from rftdask.rollouts.rewards.math_answer import is_equal, is_right, math_reward, same_answer
from tests.living import lives, wait_until

ENDLESS = r"\boxed{\sum_{n=1}^{100000000} n^n}"


def child() -> int:
    assert math_answer._VERIFIER._child is not None
    return math_answer._VERIFIER._child.pid


ACCEPTED = [
    ("x+1", "1+x"),
    ("2^3", "8"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"1\frac{1}{2}", "1.5"),
    ("0.5", "50%"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("a+b=c", "c=a+b"),
    (r"x \in (1,2)", "(1,2)"),
    ("10^{3}", "1000"),
    ("0.5", r"\frac{1}{2}"),
    (r"\dfrac{2}{4}", "1/2"),
    (r"-\frac{1}{3}", r"\frac{-1}{3}"),
    ("75%", r"\frac{3}{4}"),
    (r"1{,}250", "1250"),
    (r"3\times 10^{4}", "30000"),
    (r"12\text{ cm}", "12"),
    (r"45^\circ", "45"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\log_2 8", "3"),
    (r"\binom{5}{2}", "10"),
    ("x^2-1", "(x-1)(x+1)"),
    ("y = 2x+1", "y=1+2x"),
    ("1 + 2i", "2i+1"),
    ("x<2", "2>x"),
    (r"[0, 0.5)", r"[0,\frac{1}{2})"),
    (r"(-\infty, 2] \cup [3, \infty)", r"[3,\infty)\cup(-\infty,2]"),
    (r"\{3, 1, 2\}", r"\{1,2,3\}"),
    (r"\pm 3", r"\{-3, 3\}"),
    (r"\begin{pmatrix} 1 & 0.5 \\ 0 & 2 \end{pmatrix}", r"\begin{bmatrix} 1 & \frac{1}{2} \\ 0 & 2 \end{bmatrix}"),
]
"""An answer and a truth that math-verify finds equal, in another form each."""


@pytest.mark.parametrize(("answer", "truth"), ACCEPTED)
def test_answers_accepted_by_math_verify_are_right(answer: str, truth: str) -> None:
    assert is_equal(f"\\boxed{{{answer}}}", f"\\boxed{{{truth}}}") is True
    assert same_answer(answer, truth) and is_right(f"Hence $\\boxed{{{answer}}}$.", truth)
    assert math_reward(f"Hence $\\boxed{{{answer}}}$.", truth, Task("sums", 0, 0)).value == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("-x", "x"), ("[0,1)", "[0,1]"), ("(1,2)", "(2,1)"), ("0.333", "1/3"), ("no", "on"), ("(" * 390, "5")],
)
def test_different_as_mathematics(answer: str, truth: str) -> None:
    assert not same_answer(answer, truth)


def test_boxed_truth_and_unmarked_answer_are_found() -> None:
    assert is_right(r"Hence \boxed{a/b}.", r"so it is \boxed{\frac{a}{b}}.")
    assert is_right("we get $x+1$", "1+x")
    assert not is_right("we get $x+2$", "1+x")
    assert not is_right("x, and 1 more", "x")


def test_truth_without_mathematics_gives_none() -> None:
    assert is_equal("5", "none at all") is None


def test_endless_comparison_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    assert is_equal(ENDLESS, r"\boxed{5}") is False
    assert "it used 5 s of processor time" in caplog.text
    assert is_equal("$5$", "$5$") is True


@pytest.mark.slow
def test_killed_child_is_replaced() -> None:
    assert is_equal("$5$", "$5$")
    os.kill(child(), signal.SIGKILL)
    wait_until(lambda: not lives(child()), "its end")
    assert is_equal("$5$", "$5$")


@pytest.mark.slow
def test_comparison_that_kills_two_children_is_false(caplog: pytest.LogCaptureFixture) -> None:
    assert is_equal("$5$", "$5$")
    said: list[bool | None] = []
    asking = threading.Thread(target=lambda: said.append(is_equal(ENDLESS, r"\boxed{5}")))
    before = psutil.Process(child()).cpu_times().user
    asking.start()
    wait_until(lambda: psutil.Process(child()).cpu_times().user > before + 0.2, "its work")
    first = child()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: math_answer._VERIFIER._child is not None and child() != first, "the next child")
    os.kill(child(), signal.SIGKILL)
    asking.join(60)
    assert said == [False]
    assert "ended with code -9" in caplog.text
    assert is_equal("$5$", "$5$")


def test_fork_starts_its_own_child() -> None:
    assert is_equal("$5$", "$5$")
    with math_answer._VERIFIER._lock:  # held by a thread that the fork does not have
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            os._exit(0 if is_equal("$x+1$", "$1+x$") else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert is_equal("$5$", "$5$")


def test_child_ends_with_its_parent() -> None:
    source = (
        "import threading, time\n"
        "from rftdask.rollouts.rewards.math_answer import _VERIFIER, is_equal\n"
        "is_equal('$5$', '$5$')\n"
        f"threading.Thread(target=is_equal, args=({ENDLESS!r}, '$5$')).start()\n"
        "print(_VERIFIER._child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        asker.kill()
    wait_until(lambda: not lives(pid), "its end")
