from deploy.runs.observation import Metrics, Scrapes

TEXT = """\
# TYPE heterorl_node_transfer_bytes counter
heterorl_node_transfer_bytes_total{kind="delta",direction="in"} 100.0
heterorl_node_transfer_bytes_total{kind="keyframe",direction="in"} 20.0
heterorl_node_transfer_bytes_total{kind="delta",direction="out"} 7.0
"""
NAME = "heterorl_node_transfer_bytes_total"


def test_a_total_sums_the_samples_that_have_the_labels_and_no_others() -> None:
    metrics = Metrics(TEXT)
    assert metrics.total(NAME, direction="in") == 120.0
    assert metrics.total(NAME, direction="in", kind="delta") == 100.0
    assert metrics.total(NAME) == 127.0
    assert metrics.total("heterorl_node_transfer_bytes") == 0.0


def test_samples_are_found_by_a_label_unless_they_are_no_numbers() -> None:
    text = '# TYPE drift gauge\ndrift{age="1"} 0.5\ndrift{age="2"} NaN\n'
    assert Metrics(text).by_label("drift", "age") == {"1": 0.5}


def test_counters_of_a_killed_process_are_not_forgotten() -> None:
    scrapes = Scrapes()
    scrapes.put("sampler-1", 1, Metrics(TEXT))
    scrapes.put("sampler-1", 1, Metrics(TEXT))
    scrapes.put("sampler-1", 2, Metrics(TEXT.replace("100.0", "1.0")))
    assert scrapes.total("sampler-1", NAME, kind="delta", direction="in") == 101.0
    assert scrapes.newest("sampler-1").total(NAME, kind="delta", direction="in") == 1.0


def test_a_process_that_was_never_scraped_counts_nothing() -> None:
    scrapes = Scrapes()
    assert scrapes.total("learner", NAME) == 0.0
    assert scrapes.newest("learner").total(NAME) == 0.0
