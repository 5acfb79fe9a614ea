"""A PipelineTrainer that was given no cluster starts workers, and ends them."""

from tests.integrations.trainers import assert_same_history, assert_same_model, gpt2, padded, sentences, train, trainers


def test_the_trainer_starts_and_ends_workers(tmp_path):
    options = {"per_device_train_batch_size": 4, "max_steps": 2}
    plain, own = trainers(gpt2(), tmp_path, None, options, train_dataset=sentences(13), data_collator=padded)
    train(plain, own)
    workers = own.driver.cluster
    assert len(workers) == 2 and not workers.closed
    own.end()
    assert workers.closed
    assert_same_history(own, plain)
    assert_same_model(own.model, plain.model)
