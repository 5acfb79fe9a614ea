"""All messages between the controller and the workers.

The controller numbers its commands. All workers of a cluster see the same numbers, so a number also says in which step a
value was sent, and which commands to give up after a failure. A worker carries out its commands in order, and answers
each of them.
"""
