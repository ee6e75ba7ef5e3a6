"""Training programs drawn from a grammar, run under torch's class and under ours, and compared.

program.py      what a program is: plain data
grammar.py      draws one from a seed
text.py         prints one as Python
modules.py      what its models are made of
interpreter.py  runs one on this rank, and keeps what can be seen of it
facts.py        what is known of one without running it
oracle.py       is what ours did right, given what torch's class did?
shrink.py       finds a smaller program that fails in the same way
ranks.py        what runs on each of the two ranks
runner.py       gives programs to warm ranks, and replaces ranks that hang

`python -m tests.fuzz --programs 20000 --seed 1` runs many; see `--help`.
"""
