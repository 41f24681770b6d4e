"""One trainer over several processes, on one machine or on a Ray cluster. Start at ``fleet.py``.

::

    driver                                     rank 0 … rank N-1
    TrainerFleet ── request + one block ─────► Rank: MegatronTrainer, one process each
       ▲   rows packed once, in shared memory    │ torch.distributed between the ranks
       └── reply of every rank, weights of 0 ◄───┘

``local.py`` starts the ranks on this machine, ``ray_workers.py`` as Ray actors; everything else is
the same for both.
"""
