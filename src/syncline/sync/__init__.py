"""What keeps replicas equal: gradients, buffers, whole trees of tensors, and agreement before the first byte.

selection.py        which parameters and buffers of a module take part
gradients.py        hooks, buckets in flight, the end of a backward
bucket.py           one bucket and its states
share.py            this rank's share of a bucket, where it reduces and steps no more
stand_in.py         what stands in for gradients that are not all here
one_copy.py         who may write parameters of which there is one copy, and when
sparse.py           a bucket of one sparse gradient
comm_hook.py        a user's hook in place of all_reduce, with torch's interface
caretakers.py       which gradient synchronizations there are, found by a parameter
usage.py            which parameters a backward will reach: asked of the engine, or learnt once
reentrant.py        is this backward inside of another one?
outputs.py          the tensors in whatever a forward returns
control.py          what travels with the last bucket besides gradients
control_message.py  the same by itself, where no bucket can carry it
wrapper_protocol.py how code below the wrapper finds it, and what it may ask of it
stop_vote.py        which ranks were asked to stop, known to all after the same step
items.py            how many items stand behind the gradients
normalize.py        dividing by them
ledger.py           what was reduced in the last backward
join.py             uneven inputs: a rank without any takes part with zeros
buffer_hook.py      a user's hook in place of their policy, with torch's interface
buffers.py          a module's buffers before a forward, and after the last step
pooling.py          the mean of buffers over ranks; running variances are pooled, not averaged
tensors.py          naming the tensors of a target, and broadcasting them
reduction.py        reducing them
fingerprint.py      are they equal? 64 bits a tensor
optimizers.py       the numbers of an optimizer, which travel beside its tensors
in_backward.py      optimizers that step inside backward, after the reduction
mixed_precision.py  torch's argument of that name
compilation.py      what torch.compile must leave as it is
agreement.py        do all ranks mean the same? A digest when they do, a readable difference when not
metrics.py          weighted means of numbers and tensors over ranks
"""
