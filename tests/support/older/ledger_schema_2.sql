BEGIN TRANSACTION;
CREATE TABLE bad_prompts (
    prompt_index INTEGER PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL, times INTEGER NOT NULL,
    slot INTEGER NOT NULL, at_s REAL NOT NULL, said_by TEXT NOT NULL
) STRICT;
INSERT INTO "bad_prompts" VALUES(14,'prompt_too_long','9000 tokens',1,4,1800000000.0,'["s1"]');
CREATE TABLE data (
    "only" INTEGER PRIMARY KEY CHECK ("only" = 1), digest BLOB NOT NULL, rows INTEGER NOT NULL,
    evaluation_rows INTEGER NOT NULL, held_out_at INTEGER NOT NULL, first_slot INTEGER NOT NULL
) STRICT;
INSERT INTO "data" VALUES(1,X'64646464646464646464646464646464',100,10,90,0);
CREATE TABLE evaluation_scores (
    version INTEGER NOT NULL, slot INTEGER NOT NULL, sampler_id TEXT NOT NULL, reward_mean REAL NOT NULL,
    cut_completions INTEGER NOT NULL, tokens INTEGER NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (version, slot)
) STRICT, WITHOUT ROWID;
INSERT INTO "evaluation_scores" VALUES(0,0,'s1',0.5,0,4,'');
INSERT INTO "evaluation_scores" VALUES(30,0,'s1',0.5,0,4,'');
CREATE TABLE evaluation_slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
INSERT INTO "evaluation_slots" VALUES(0,48,'evaluated','[[1, "s1", true, null]]',1,1);
CREATE TABLE evaluations (
    version INTEGER PRIMARY KEY, first_prompt INTEGER NOT NULL, prompts INTEGER NOT NULL,
    completions INTEGER NOT NULL, temperature REAL NOT NULL, max_new_tokens INTEGER NOT NULL,
    started_at_s REAL NOT NULL, finished_at_s REAL NOT NULL,
    counted_prompts INTEGER NOT NULL, dropped_prompts INTEGER NOT NULL,
    reward_mean REAL NOT NULL, reward_standard_error REAL NOT NULL, cut_ratio REAL NOT NULL,
    tokens_mean REAL NOT NULL, sampling TEXT NOT NULL, metrics TEXT NOT NULL, answers INTEGER NOT NULL,
    samplers INTEGER NOT NULL, left_out TEXT NOT NULL, disputed_by TEXT NOT NULL
) STRICT;
INSERT INTO "evaluations" VALUES(0,48,10,1,0.0,8,1.0,2.0,9,1,0.5,0.1,0.25,4.0,'','{"words": 2.5}',18,2,'','');
INSERT INTO "evaluations" VALUES(10,48,10,1,0.0,8,3.0,4.0,8,2,0.9,0.1,0.25,4.0,'','',8,1,'','');
INSERT INTO "evaluations" VALUES(20,48,10,1,0.0,8,5.0,6.0,0,10,0.0,0.0,0.0,0.0,'','',0,0,'','');
INSERT INTO "evaluations" VALUES(30,48,10,1,0.0,8,7.0,0.0,1,0,0.0,0.0,0.0,0.0,'','',1,1,'','');
CREATE TABLE generations (
    number INTEGER PRIMARY KEY, first_slot INTEGER NOT NULL, lost_from_slot INTEGER NOT NULL,
    begun_at_s REAL NOT NULL, lost_first_version INTEGER, lost_last_version INTEGER
) STRICT;
INSERT INTO "generations" VALUES(1,0,0,5.0,0,-1);
CREATE TABLE groups (
    slot INTEGER PRIMARY KEY, attempt INTEGER NOT NULL, sampler_id TEXT NOT NULL,
    spooled_at_s REAL NOT NULL, digest BLOB NOT NULL, header BLOB NOT NULL, columns BLOB NOT NULL
) STRICT;
INSERT INTO "groups" VALUES(5,1,'s2',1800000000.0,X'5B08010F23DFB35F',X'67726F757020',X'352E31');
CREATE TABLE learner (
    "only" INTEGER PRIMARY KEY CHECK ("only" = 1),
    node_id TEXT NOT NULL, epoch INTEGER NOT NULL, layout_digest BLOB NOT NULL,
    tokenizer_digest BLOB NOT NULL, vocabulary_size INTEGER NOT NULL, version INTEGER NOT NULL,
    chat_template_digest BLOB NOT NULL, base_root BLOB NOT NULL, base_parts BLOB NOT NULL,
    layout_summary TEXT NOT NULL, context_tokens INTEGER NOT NULL,
    text_digest BLOB NOT NULL, text_summary TEXT NOT NULL
) STRICT;
INSERT INTO "learner" VALUES(1,'learner',1,X'6C6C6C6C6C6C6C6C6C6C6C6C6C6C6C6C',X'74747474747474747474747474747474',100,2,X'',X'72727272727272727272727272727272',X'70707070707070707070707070707070','layers 2',63,X'78787878787878787878787878787878','rule	value
other	thing');
CREATE TABLE run (run_id TEXT NOT NULL) STRICT;
INSERT INTO "run" VALUES('run');
CREATE TABLE size_words (
    sampler_id TEXT PRIMARY KEY, task TEXT NOT NULL, prompts INTEGER NOT NULL
) STRICT;
INSERT INTO "size_words" VALUES('s1','addition',50);
CREATE TABLE slots (
    number INTEGER PRIMARY KEY, prompt_index INTEGER NOT NULL, state TEXT NOT NULL,
    attempts TEXT NOT NULL, granted INTEGER NOT NULL, winner INTEGER NOT NULL
) STRICT;
INSERT INTO "slots" VALUES(0,24,'trained','[[1, "s1", true, null]]',1,1);
INSERT INTO "slots" VALUES(1,17,'trained','[[1, "s1", true, null]]',1,1);
INSERT INTO "slots" VALUES(2,21,'trained','[[1, "s1", true, null]]',1,1);
INSERT INTO "slots" VALUES(3,33,'trained','[[1, "s1", true, null]]',1,1);
INSERT INTO "slots" VALUES(4,14,'available','[[1, "s1", false, "prompt_too_long"]]',1,0);
INSERT INTO "slots" VALUES(5,25,'spooled','[[1, "s2", true, null]]',1,1);
INSERT INTO "slots" VALUES(6,11,'leased','[[1, "s1", false, null]]',1,0);
CREATE TABLE staleness (sampler_id TEXT PRIMARY KEY, versions INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO "staleness" VALUES('s1',0);
CREATE TABLE standings (
    sampler_id TEXT PRIMARY KEY, allowance INTEGER NOT NULL, expired INTEGER NOT NULL, faulted INTEGER NOT
    NULL, contradicted INTEGER NOT NULL, strikes INTEGER NOT NULL, struck_at_s REAL NOT NULL, halved_at_s REAL
    NOT NULL, quarantines INTEGER NOT NULL, quarantine TEXT NOT NULL, quarantined_at_s REAL NOT NULL,
    probed_at_s REAL NOT NULL, checks INTEGER NOT NULL, differing INTEGER NOT NULL, stake REAL NOT NULL,
    proven_at_s REAL NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO "standings" VALUES('s1',8,0,1,0,1,1800000000.0,0.0,0,'',0.0,0.0,0,0,0.0,0.0);
INSERT INTO "standings" VALUES('s2',6,0,0,0,0,0.0,0.0,0,'',0.0,0.0,0,0,0.0,0.0);
INSERT INTO "standings" VALUES('s3',0,0,0,0,0,0.0,0.0,1,'its logprobs are off',1800000000.0,1800000000.0,0,0,0.0,0.0);
CREATE TABLE steps (
    version INTEGER PRIMARY KEY, group_ids TEXT NOT NULL, staleness_versions TEXT NOT NULL,
    restored_version INTEGER
) STRICT;
INSERT INTO "steps" VALUES(1,'["0.1", "1.1"]','[0, 0]',NULL);
INSERT INTO "steps" VALUES(2,'["2.1", "3.1"]','[0, 0]',NULL);
CREATE TABLE task (
    "only" INTEGER PRIMARY KEY CHECK ("only" = 1),
    name TEXT NOT NULL, prompts INTEGER NOT NULL, said_by TEXT NOT NULL
) STRICT;
INSERT INTO "task" VALUES(1,'addition',50,'s1');
CREATE TABLE task_options ("only" INTEGER PRIMARY KEY CHECK ("only" = 1), digest BLOB NOT NULL) STRICT;
INSERT INTO "task_options" VALUES(1,X'74747474747474747474747474747474');
CREATE TABLE verdicts (
    sampler_id TEXT NOT NULL, verdict TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (sampler_id, verdict)
) STRICT, WITHOUT ROWID;
INSERT INTO "verdicts" VALUES('s1','spooled',4);
INSERT INTO "verdicts" VALUES('s1','trained',4);
INSERT INTO "verdicts" VALUES('s2','spooled',1);
CREATE TABLE versions (number INTEGER PRIMARY KEY, root BLOB NOT NULL, at_s REAL NOT NULL) STRICT;
INSERT INTO "versions" VALUES(1,X'61616161616161616161616161616161',1.0);
INSERT INTO "versions" VALUES(2,X'62626262626262626262626262626262',2.0);
CREATE INDEX slots_by_state ON slots (state);
COMMIT;
