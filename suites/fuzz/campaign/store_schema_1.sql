-- A store as schema 1 made it: PRAGMA application_id = 1098141554, user_version = 1.
BEGIN TRANSACTION;
CREATE TABLE campaigns (
            id INTEGER PRIMARY KEY,
            identity TEXT NOT NULL,
            ordinal INTEGER NOT NULL,
            settings TEXT NOT NULL,
            finished INTEGER NOT NULL DEFAULT 0,
            UNIQUE (identity, ordinal));
INSERT INTO "campaigns" VALUES(1,'{"seed":3,"engine":"emulator","targets":{"planted.gather.values":"0123456789ab"},"shards":1,"versions":{"torch":"2.9.0"}}',1,'{"seed":3,"engine":"emulator","targets":{"planted.gather.values":"0123456789ab"},"shards":1,"versions":{"torch":"2.9.0"}}',1);
CREATE TABLE failures (
            campaign INTEGER NOT NULL,
            fault TEXT NOT NULL,
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            PRIMARY KEY (campaign, fault, target, round, idx),
            FOREIGN KEY (campaign, fault) REFERENCES findings,
            FOREIGN KEY (campaign, target, round, idx) REFERENCES results) WITHOUT ROWID;
INSERT INTO "failures" VALUES(1,'["planted.gather.values", "values", null, null]','planted.gather.values',0,0);
INSERT INTO "failures" VALUES(1,'["planted.gather.values", "values", null, null]','planted.gather.values',0,1);
INSERT INTO "failures" VALUES(1,'["planted.gather.values", "values", null, null]','planted.gather.values',0,2);
CREATE TABLE findings (
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            fault TEXT NOT NULL,
            id TEXT NOT NULL,
            signature TEXT NOT NULL,
            known TEXT,
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            size TEXT NOT NULL,
            data TEXT NOT NULL,
            severity TEXT,
            reachability TEXT,
            minimised TEXT,
            PRIMARY KEY (campaign, fault),
            FOREIGN KEY (campaign, target, round, idx) REFERENCES results) WITHOUT ROWID;
INSERT INTO "findings" VALUES(1,'["planted.gather.values", "values", null, null]','02','{"target":"planted.gather.values","check":"values"}',NULL,'planted.gather.values',0,2,'[1, 7]','{"id":"02","signature":{"target":"planted.gather.values","check":"values"},"known":null,"case":{"schema":1,"operation":"kv_gather","seed":7,"context_lens":[17,3],"query_lens":[],"num_kv_heads":2,"group_size":1,"head_dim":32,"v_head_dim":32,"dtype":"bf16","kv_dtype":"bf16","kv_layout":"shuffle_5d","v_layout":"5d","page_size":16,"placement":"shuffled","pool":"spare","index_dtype":"int64","strided":false,"causal":true,"window":null,"sinks":"none","soft_cap":null,"scale":null,"q_descale":"none","k_descale":"none","v_descale":"none","index_form":"slot_list","prefix":"inline","skip":"none","slot_map":"none","parts":1,"rank":0,"states":"full","index_task":"none","earlier_calls":0,"probe":"normal"}}','high',NULL,NULL);
CREATE TABLE nights (
            key TEXT PRIMARY KEY,
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            began TEXT NOT NULL,
            ended TEXT,
            interrupted INTEGER,
            report TEXT);
INSERT INTO "nights" VALUES('48db092c5a7e431293d517bdf76b9001',1,'2026-12-01T14:50:34+00:00','2026-12-01T14:50:34+00:00',0,'{"schema":1,"seed":3}');
CREATE TABLE results (
            campaign INTEGER NOT NULL REFERENCES campaigns (id),
            target TEXT NOT NULL,
            round INTEGER NOT NULL,
            idx INTEGER NOT NULL,
            origin TEXT NOT NULL,
            "case" TEXT NOT NULL,
            verdict TEXT,
            worst_ratio REAL,
            result TEXT NOT NULL,
            seconds TEXT NOT NULL,
            harness TEXT,
            PRIMARY KEY (campaign, target, round, idx)) WITHOUT ROWID;
INSERT INTO "results" VALUES(1,'planted.gather.values',0,0,'plan','{"schema":1,"operation":"kv_gather","seed":7,"context_lens":[17,3],"query_lens":[],"num_kv_heads":2,"group_size":1,"head_dim":32,"v_head_dim":32,"dtype":"bf16","kv_dtype":"bf16","kv_layout":"shuffle_5d","v_layout":"5d","page_size":16,"placement":"shuffled","pool":"spare","index_dtype":"int64","strided":false,"causal":true,"window":null,"sinks":"none","soft_cap":null,"scale":null,"q_descale":"none","k_descale":"none","v_descale":"none","index_form":"slot_list","prefix":"inline","skip":"none","slot_map":"none","parts":1,"rank":0,"states":"full","index_task":"none","earlier_calls":0,"probe":"normal"}','fail',NULL,'{"checks":[{"check":"values","verdict":"fail","message":"1 of 8 differ","evidence":{}}],"elements":8,"vacuous_elements":0,"worst_ratio":null,"reason":""}','{"kernel":0.5}',NULL);
INSERT INTO "results" VALUES(1,'planted.gather.values',0,1,'plan','{"schema":1,"operation":"kv_gather","seed":7,"context_lens":[17,3],"query_lens":[],"num_kv_heads":2,"group_size":1,"head_dim":32,"v_head_dim":32,"dtype":"bf16","kv_dtype":"bf16","kv_layout":"shuffle_5d","v_layout":"5d","page_size":16,"placement":"shuffled","pool":"spare","index_dtype":"int64","strided":false,"causal":true,"window":null,"sinks":"none","soft_cap":null,"scale":null,"q_descale":"none","k_descale":"none","v_descale":"none","index_form":"slot_list","prefix":"inline","skip":"none","slot_map":"none","parts":1,"rank":0,"states":"full","index_task":"none","earlier_calls":0,"probe":"normal"}','fail',NULL,'{"checks":[{"check":"values","verdict":"fail","message":"1 of 8 differ","evidence":{}}],"elements":8,"vacuous_elements":0,"worst_ratio":null,"reason":""}','{"kernel":0.5}',NULL);
INSERT INTO "results" VALUES(1,'planted.gather.values',0,2,'plan','{"schema":1,"operation":"kv_gather","seed":7,"context_lens":[17,3],"query_lens":[],"num_kv_heads":2,"group_size":1,"head_dim":32,"v_head_dim":32,"dtype":"bf16","kv_dtype":"bf16","kv_layout":"shuffle_5d","v_layout":"5d","page_size":16,"placement":"shuffled","pool":"spare","index_dtype":"int64","strided":false,"causal":true,"window":null,"sinks":"none","soft_cap":null,"scale":null,"q_descale":"none","k_descale":"none","v_descale":"none","index_form":"slot_list","prefix":"inline","skip":"none","slot_map":"none","parts":1,"rank":0,"states":"full","index_task":"none","earlier_calls":0,"probe":"normal"}','fail',NULL,'{"checks":[{"check":"values","verdict":"fail","message":"1 of 8 differ","evidence":{}}],"elements":8,"vacuous_elements":0,"worst_ratio":null,"reason":""}','{"kernel":0.5}',NULL);
COMMIT;
