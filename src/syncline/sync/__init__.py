"""What keeps replicas equal: gradients, buffers, whole trees of tensors, and agreement before the first byte.

gradients.py   hooks, buckets in flight, the end of a backward
bucket.py      one bucket and its states
control.py     what travels with the last bucket besides gradients
items.py       how many items stand behind the gradients
buffers.py     a module's buffers before a forward, and after the last step
pooling.py     the mean of buffers over ranks; running variances are pooled, not averaged
tensors.py     naming the tensors of a target, and broadcasting them
optimizers.py  the numbers of an optimizer, which travel beside its tensors
agreement.py   do all ranks mean the same? A digest when they do, a readable difference when not
metrics.py     weighted means of numbers and tensors over ranks
"""
