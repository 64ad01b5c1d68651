"""sglang's attention backend for aiter over a SHUFFLE 5D pool: its own code from the request table to the output.

``loading`` executes the files of the installed sglang, ``fakes`` stands for the objects that it is given, and
``targets`` declares the steps. What lies beneath (aiter's functions) is named by each target.
"""
