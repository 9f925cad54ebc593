"""Management of worker processes in their parent: start, watch, replace, end, and send to them.

    parent process                                                worker process
    event loop's thread                                           main thread
      pool -> worker_handle
              worker_process -> LoopChannel  <=== pipes ===>  BlockingChannel <- _worker.frames
    spawner thread (pool)                                         watcher thread
      starts the processes                                          ends it when the parent is dead
    copier thread (staging)
      copies large inputs and outputs into and out of shared memory

Each worker has its own pair of pipes, so the death of one worker damages no frame of another.
Nothing in this package runs in a worker; the worker's code is in `_worker`.
"""
