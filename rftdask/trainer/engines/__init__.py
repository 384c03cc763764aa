"""Train engines: one optimizer step on a batch. The one of torch with passes, optimizer, critic and files; and a fake.

An engine is registered by the class attribute `trainer_type` of its class, so adding one is adding a module.
"""
