"""A multi-agent policy with three action heads, trained by our losses and by TorchRL's.

Run it with ``python -m composite_losses.demo``; ``--help`` lists the options.
"""
