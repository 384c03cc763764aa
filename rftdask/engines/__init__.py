"""Engines: token ids in, token ids and logprobs out. One module per engine, and the process that an engine runs in.

An engine is registered by the class attribute `engine_type` of its class, so adding one is adding a module. The folder
knows no tasks, text, rewards or storage. Importing it needs neither torch nor transformers nor vLLM.
"""
