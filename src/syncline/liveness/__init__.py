"""Which rank is where, and which rank is gone: what turns a wait into an error that names the cause.

Imports: errors, environment, user_code, _torch.

board.py             the step, phase and bucket of each rank, published for its peers
calls.py             what a rank called, and why its group is broken: the text of errors
deadlock.py          can the waiting ranks ever go on? Pure functions of the board
forks.py             refuse a forked child that uses its parent's group
health.py            can a torch.distributed group still be used, and if not, why?
notices.py           failures that ranks publish for each other through the store
processes.py         has the process of a rank ended, or is it stopped?
store_connection.py  our connection to the store, and whether the store still exists
store_messages.py    messages at the store: signed with the job's token, checked when read
torch_calls.py       collectives that the program starts by torch.distributed itself
"""
