"""Detection of failed, stopped and deadlocked ranks, so that a wait ends with an error that names the cause.

Imports: errors, environment, user_code, _torch.

board.py             the step, phase and bucket of each rank, published for its peers
calls.py             descriptions of calls and of failures, for error messages
deadlock.py          detect ranks that wait for each other forever: pure functions of the board
forks.py             refuse a forked child that uses its parent's group
health.py            the state of a group on this rank: usable or failed, and the cause
notices.py           failures and positions that ranks publish to each other through the store
processes.py         detect ranks whose process has ended or is stopped
store_connection.py  our connection to the store, and whether the store still exists
store_messages.py    messages in the store: signed with the job's token, checked when read
torch_calls.py       collectives that the program starts through torch.distributed directly
"""
