"""Engines: token ids in, token ids and logprobs out. One module per engine, and the process that an engine runs in.

An engine is registered by the class attribute `engine_type`, so adding an engine is adding a module. Importing this
package needs neither torch nor transformers nor vLLM.
"""
