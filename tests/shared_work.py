"""Work for other processes, in a module that imports nothing heavy."""

import os
import time

from windage.estimators.errors import BadInput


def squares(numbers):
    """Each number, its square and who computed it; 13 is refused, 17 ends the process."""
    for number in numbers:
        if number == 13:
            raise BadInput("13 is no number; allowed: others")
        if number == 17:
            os._exit(1)
        yield number, number**2, os.getpid()


def forever(folders):
    """Leave the process's number in a folder and go on until ended."""
    for n in range(10**6):
        with open(os.path.join(folders[0], str(os.getpid())), "w") as file:
            file.write(str(n))
        time.sleep(0.2)
        yield n
