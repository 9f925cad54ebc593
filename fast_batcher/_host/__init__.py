"""Shared workers for all processes of a server: the host process, and the way to it.

    server process                                               host process
    identity     the key: who shares a host
    rendezvous   finds the key's host, or starts it
    launch       the process, its output and its end     ------>  main     the listener, stderr
    link         the connection                                   server   API processes
    client       `RemoteOpening`: requests, outcomes     <----->  tenant   one API process
    inputs       packing of their inputs                          opening  scheduler and workers
                                     messages, protocol

The rendezvous takes place in a private directory (`directory`), under a lock. The starter of a host
binds its socket, listens, and connects before the host exists; the host inherits the listener.
Whoever connects meanwhile waits in the socket's backlog, without polling, and reads an end of
file or a reset if the host dies.
"""
