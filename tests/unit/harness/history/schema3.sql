PRAGMA application_id=1144015409;
PRAGMA user_version=3;
BEGIN TRANSACTION;
CREATE TABLE cases (
            folder TEXT NOT NULL REFERENCES folders (id), case_id TEXT NOT NULL,
            attempt INTEGER NOT NULL, outcome TEXT NOT NULL, what TEXT NOT NULL,
            message TEXT NOT NULL, labels TEXT NOT NULL, causes TEXT NOT NULL, difference TEXT,
            reference TEXT NOT NULL, control TEXT NOT NULL, candidate TEXT NOT NULL,
            wall_s REAL NOT NULL, digest TEXT NOT NULL, retried TEXT NOT NULL DEFAULT '[]', inputs TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (folder, case_id, attempt));
INSERT INTO "cases" VALUES('00000000000000000000000000000000','dp1-attn',0,'passed','','every check said yes (loss, state, finite, peak_memory); the reference equals its second run bit for bit','{"graph":"attn","parallel":"dp1"}','[]',NULL,'w1-eager-r0-9723a2efa609','w1-eager-r1-ec55abe2fe4b','w1-attn-r0-b07090b8f04a',1.25,'c23da48c20ce665d','[]','');
INSERT INTO "cases" VALUES('00000000000000000000000000000000','dp2-attn',0,'failed','diverged','loss differs first at step 2 on rank 0: 4.35215425 (0x408b44d9) became 4.35215569 (0x408b44dc), 3 ulps apart; 4 of 8 (step, rank) pairs differ, on ranks 0 and 1','{"graph":"attn","parallel":"dp2"}','["loss: failed diverged"]','{"candidate":"4.35215569 (0x408b44dc)","quantity":"loss","rank":0,"reference":"4.35215425 (0x408b44d9)","step":2,"tensor":"","ulps":3}','w2-eager-r0-3b5ea22b077b','w2-eager-r1-3f1cdd16b509','w2-attn-r0-df9a9e6f5822',1.25,'ceb79435f855f84b','[]','');
INSERT INTO "cases" VALUES('00000000000000000000000000000000','dp6-attn',0,'skipped','unsupported','needs 6 GPUs, this machine has 0','{"graph":"attn","parallel":"dp6"}','[]',NULL,'w6-eager-r0-ff381abbd844','w6-eager-r1-d9617b2d6ad1','w6-attn-r0-e5664781bc53',1.25,'958293b0cb6b2b1e','[]','');
INSERT INTO "cases" VALUES('00000000000000000000000000000001','dp1-attn',0,'passed','','every check said yes (loss, state, finite, peak_memory); the reference equals its second run bit for bit','{"graph":"attn","parallel":"dp1"}','[]',NULL,'w1-eager-r0-9723a2efa609','w1-eager-r1-ec55abe2fe4b','w1-attn-r0-b07090b8f04a',1.25,'c23da48c20ce665d','[]','');
INSERT INTO "cases" VALUES('00000000000000000000000000000001','dp2-attn',0,'failed','diverged','loss differs first at step 2 on rank 0: 4.35215425 (0x408b44d9) became 4.35215569 (0x408b44dc), 3 ulps apart; 4 of 8 (step, rank) pairs differ, on ranks 0 and 1','{"graph":"attn","parallel":"dp2"}','["loss: failed diverged"]','{"candidate":"4.35215569 (0x408b44dc)","quantity":"loss","rank":0,"reference":"4.35215425 (0x408b44d9)","step":2,"tensor":"","ulps":3}','w2-eager-r0-3b5ea22b077b','w2-eager-r1-3f1cdd16b509','w2-attn-r0-df9a9e6f5822',1.25,'ceb79435f855f84b','[]','');
INSERT INTO "cases" VALUES('00000000000000000000000000000001','dp6-attn',0,'skipped','unsupported','needs 6 GPUs, this machine has 0','{"graph":"attn","parallel":"dp6"}','[]',NULL,'w6-eager-r0-ff381abbd844','w6-eager-r1-d9617b2d6ad1','w6-attn-r0-e5664781bc53',1.25,'958293b0cb6b2b1e','[]','');
CREATE TABLE folders (
            id TEXT NOT NULL PRIMARY KEY, scenario TEXT NOT NULL, created TEXT NOT NULL,
            num_cases INTEGER NOT NULL, "commit" TEXT NOT NULL, shard TEXT NOT NULL,
            tier TEXT NOT NULL, device TEXT NOT NULL, machine TEXT NOT NULL,
            slots INTEGER NOT NULL, environment TEXT NOT NULL, fingerprints TEXT NOT NULL,
            digest TEXT NOT NULL);
INSERT INTO "folders" VALUES('00000000000000000000000000000000','fsdp_cudagraph_alignment','2031-02-03T04:05:06+00:00',3,'3f1c0a9d','1/2','nightly','cpu','8 cores',8,'{"cores":8,"gpu_driver":"","gpus":[],"memory_gib":32,"python":"3.11.7","system":"Linux","variables":{},"versions":{"torch":"2.12.0"}}','{"dc11b5958fe205b0":{"ranks":[{"corpus":"sha256:2f1c9a","deterministic":true,"device":"cpu","python":"3.11.7","threads":1,"torch":"2.12.0"}]}}','34ce585bae23e7e4');
INSERT INTO "folders" VALUES('00000000000000000000000000000001','fsdp_cudagraph_alignment','2031-02-04T04:05:06+00:00',3,'77aa01c2+5d0e12ab','1/2','nightly','cpu','8 cores',8,'{"cores":8,"gpu_driver":"","gpus":[],"memory_gib":32,"python":"3.11.7","system":"Linux","variables":{},"versions":{"torch":"2.12.0"}}','{"dc11b5958fe205b0":{"ranks":[{"corpus":"sha256:2f1c9a","deterministic":true,"device":"cpu","python":"3.11.7","threads":1,"torch":"2.12.0"}]}}','e6f75e68c2c2a5b2');
CREATE TABLE runs (
            folder TEXT NOT NULL REFERENCES folders (id), "key" TEXT NOT NULL,
            attempt INTEGER NOT NULL, work TEXT NOT NULL, what TEXT NOT NULL,
            device TEXT NOT NULL, world_size INTEGER NOT NULL, preset TEXT NOT NULL,
            steps INTEGER NOT NULL, started_unix_s REAL NOT NULL, wall_s REAL NOT NULL,
            fingerprint TEXT NOT NULL, problems INTEGER NOT NULL, startup_s REAL, step_s REAL,
            step_spread_s REAL, timed_steps INTEGER NOT NULL, peak_bytes INTEGER,
            replays INTEGER NOT NULL, loss_bits TEXT NOT NULL, digest TEXT NOT NULL, state_bits TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (folder, "key", attempt));
INSERT INTO "runs" VALUES('00000000000000000000000000000000','w1-eager-r0-9723a2efa609',0,'fd5fbca3d1ed5e52','','cpu',1,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41943040,0,'fce221555812ec653cb32f118f18f0d8','cd153d6508f727de','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000000','w1-eager-r1-ec55abe2fe4b',0,'fd5fbca3d1ed5e52','','cpu',1,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41943040,0,'fce221555812ec653cb32f118f18f0d8','9948f602c5c412a9','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000000','w1-attn-r0-b07090b8f04a',0,'709f68f5d0a0737e','','cpu',1,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41943040,4,'fce221555812ec653cb32f118f18f0d8','de5573c0cb6fc766','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000000','w2-eager-r0-3b5ea22b077b',0,'a4fcdb843ecba856','','cpu',2,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41947136,0,'9f712a1204ba70cb0827f546bc085118','dd4829cedc382883','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000000','w2-eager-r1-3f1cdd16b509',0,'a4fcdb843ecba856','','cpu',2,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41947136,0,'9f712a1204ba70cb0827f546bc085118','3f9a31857944118b','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000000','w2-attn-r0-df9a9e6f5822',0,'6cf70d97aa7c7856','','cpu',2,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41947136,4,'35526d1a5b5ec9c18ca7f23463574d59','a65edd4008e817f3','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000001','w1-eager-r0-9723a2efa609',0,'fd5fbca3d1ed5e52','','cpu',1,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41943040,0,'fce221555812ec653cb32f118f18f0d8','cd153d6508f727de','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000001','w1-eager-r1-ec55abe2fe4b',0,'fd5fbca3d1ed5e52','','cpu',1,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41943040,0,'fce221555812ec653cb32f118f18f0d8','9948f602c5c412a9','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000001','w1-attn-r0-b07090b8f04a',0,'709f68f5d0a0737e','','cpu',1,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41943040,4,'fce221555812ec653cb32f118f18f0d8','de5573c0cb6fc766','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000001','w2-eager-r0-3b5ea22b077b',0,'a4fcdb843ecba856','','cpu',2,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41947136,0,'9f712a1204ba70cb0827f546bc085118','dd4829cedc382883','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000001','w2-eager-r1-3f1cdd16b509',0,'a4fcdb843ecba856','','cpu',2,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41947136,0,'9f712a1204ba70cb0827f546bc085118','3f9a31857944118b','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
INSERT INTO "runs" VALUES('00000000000000000000000000000001','w2-attn-r0-df9a9e6f5822',0,'6cf70d97aa7c7856','','cpu',2,'',4,0.0,1.25,'dc11b5958fe205b0',0,0.1,0.01,0.0,3,41947136,4,'35526d1a5b5ec9c18ca7f23463574d59','a65edd4008e817f3','5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e');
CREATE INDEX folders_of_scenario ON folders (scenario, created);
CREATE INDEX cases_by_id ON cases (case_id);
CREATE INDEX runs_by_work ON runs (work);
COMMIT;
