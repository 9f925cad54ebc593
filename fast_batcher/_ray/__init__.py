"""Workers that are actors of a Ray cluster. Nothing else of the library imports Ray.

    host process, of the API processes              node of the cluster
    cluster   Ray's driver: connection, nodes
    handle    `RayWorker`, of the pool     ==calls==>  actor   loads the model, computes batches

A batch is one call of the actor. The call and its answer carry the frames that a worker process
reads from its pipe and writes there; to Ray they are bytes. Ray restarts no actor and repeats no
call: retries are the scheduler's.
"""
