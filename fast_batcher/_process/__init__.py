"""Worker processes: how they are started, watched and ended, and what runs inside them.

    API process                                             worker process
    event loop's thread                                     main thread
      pool -> worker_handle -> LoopChannel  <=== pipe ===>  BlockingChannel <- worker_main -> model
    starter thread                                          watcher thread
      Process.start()                                         ends it when the parent is gone
    copier thread, and one that helps it
      copy what is large into and out of shared memory

Each worker has a pipe of its own: whatever happens to one, no lock and no byte of another is
touched. `worker_main` is all that runs in the child; everything else here runs in the parent.
"""
