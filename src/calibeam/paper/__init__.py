"""The paper, as pure functions of tensors and strings: no I/O, no settings, no models.

Nothing in here imports torch: the functions use their tensors' own methods, so the command line can
list the choices of a stage at once. `docs/paper.md` says which equation is where.
"""
