-- The whole store of FlashSale. Every key begins with the sale, so that one statement touches one sale only.
-- Every statement here can be run again: MySQL commits DDL one by one, and a migration may be killed half-way.

-- One row per FlashSale object (sale_id is its UID): what the reservation pods obey, by the database's clock.
CREATE TABLE IF NOT EXISTS flashsale_sale (
  sale_id       BINARY(16)      NOT NULL,
  name          VARCHAR(320)    NOT NULL COMMENT 'namespace/name of the object, for people',
  sku           VARCHAR(253)    NOT NULL,
  units         INT UNSIGNED    NOT NULL,
  starts_at     DATETIME(6)     NOT NULL COMMENT 'UTC, as every time here',
  ends_at       DATETIME(6)     NULL     COMMENT 'exclusive',
  hold_ttl_us   BIGINT UNSIGNED NOT NULL,
  max_per_buyer INT UNSIGNED    NOT NULL,
  highest_limit INT UNSIGNED    NOT NULL COMMENT 'the largest max_per_buyer there ever was: what the audit holds buyers to',
  refuse_late   BOOLEAN         NOT NULL DEFAULT FALSE COMMENT 'a payment for a lapsed hold is to be refunded, even when units are free',
  suspended     BOOLEAN         NOT NULL DEFAULT FALSE,
  draining      BOOLEAN         NOT NULL DEFAULT FALSE COMMENT 'the object is being deleted: no new holds',
  generation    BIGINT          NOT NULL COMMENT 'metadata.generation of the spec written last; an older one never overwrites it',
  loaded_at     DATETIME(6)     NULL     COMMENT 'when the last unit row was in',
  opened_at     DATETIME(6)     NULL     COMMENT 'when it opened, of a sale that was suspended or resumed since its start; else that is the later of starts_at and loaded_at',
  closed_at     DATETIME(6)     NULL,
  announced     TINYINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'events written: bit 0 opened, bit 1 sold out, bit 2 closed',
  removed       INT UNSIGNED    NOT NULL DEFAULT 0 COMMENT 'unit rows taken away by Shrink; unit numbers are not used again',
  release_at_end BOOLEAN        NOT NULL DEFAULT FALSE COMMENT 'holds lapse at the end of the sale, when that comes before their time is over',
  PRIMARY KEY (sale_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row per unit, updated in place. It names the reservation that had the unit last; that one's state says what became of
-- it, so that confirming and expiring leave the unit's row alone. A unit is available when it is fresh (no reservation yet)
-- or listed in flashsale_returned.
CREATE TABLE IF NOT EXISTS flashsale_unit (
  sale_id        BINARY(16)   NOT NULL,
  unit_no        INT UNSIGNED NOT NULL,
  reservation_id BINARY(16)   NOT NULL DEFAULT 0x00000000000000000000000000000000 COMMENT 'zero while fresh, all ones when the last reservation got others for it; fixed size, so that updates stay in place',
  PRIMARY KEY (sale_id, unit_no)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Units that came back. Fresh units are found by a moving start on flashsale_unit; these lie behind it.
CREATE TABLE IF NOT EXISTS flashsale_returned (
  sale_id BINARY(16)   NOT NULL,
  unit_no INT UNSIGNED NOT NULL,
  PRIMARY KEY (sale_id, unit_no)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row per reservation. What changes when one ends has a fixed size and no index: its row is updated in place.
-- The unique key makes one live reservation per buyer and the limit hold across pods: a claim locks the buyer's newest
-- reservation, or, when there is none, meets a duplicate key if another pod was faster. The reservation counts until
-- expires_at, whether or not a sweeper came by.
CREATE TABLE IF NOT EXISTS flashsale_reservation (
  sale_id        BINARY(16)       NOT NULL,
  reservation_id BINARY(16)       NOT NULL COMMENT 'UUID version 7, made by the client of the time granted_at: the newest are at the end',
  buyer          VARBINARY(128)   NOT NULL COMMENT 'compared byte by byte',
  superseded     INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT '0 for the newest of its buyer; the others are numbered from 1',
  earlier        INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT 'how many reservations the buyer had before',
  bought         INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT 'kept of the newest: units that the buyer bought with the others',
  quantity       INT UNSIGNED     NOT NULL,
  unit_nos       VARCHAR(9000) CHARACTER SET ascii NOT NULL COMMENT 'the units, comma separated',
  state          TINYINT UNSIGNED NOT NULL DEFAULT 1 COMMENT '1 held, 2 confirmed, 3 released, 4 expired, 5 refunded with its units given back, 6 refunded without',
  granted_at     DATETIME(6)      NOT NULL,
  expires_at     DATETIME(6)      NOT NULL,
  changed_at     DATETIME(6)      NOT NULL DEFAULT CURRENT_TIMESTAMP(6) COMMENT 'when the state became what it is',
  PRIMARY KEY (sale_id, reservation_id),
  UNIQUE KEY buyer (sale_id, buyer, superseded)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Holds that were granted together lapse together: one row for all of a transaction. It is where sweepers look, instead of
-- an index entry per hold, which every claim, confirmation and sweep would have to write. Holds that ended otherwise stay
-- in the row until its time comes.
CREATE TABLE IF NOT EXISTS flashsale_wave (
  sale_id         BINARY(16)  NOT NULL,
  lapses_at       DATETIME(6) NOT NULL,
  wave_id         BINARY(16)  NOT NULL,
  reservation_ids MEDIUMBLOB  NOT NULL COMMENT '16 bytes each',
  PRIMARY KEY (sale_id, lapses_at, wave_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Idempotency keys of requests that were given a reservation.
CREATE TABLE IF NOT EXISTS flashsale_key (
  sale_id        BINARY(16)   NOT NULL,
  key_hash       BINARY(16)   NOT NULL COMMENT 'first half of SHA-256 over buyer and key',
  quantity       INT UNSIGNED NOT NULL COMMENT 'what the request asked for: another one may not use the key',
  reservation_id BINARY(16)   NOT NULL,
  PRIMARY KEY (sale_id, key_hash)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row per payment, which takes effect once, for ever: it confirms one reservation, or is due to be refunded.
CREATE TABLE IF NOT EXISTS flashsale_ledger (
  sale_id        BINARY(16)     NOT NULL,
  payment_id     VARBINARY(128) NOT NULL,
  reservation_id BINARY(16)     NOT NULL COMMENT 'as told by the checkout; of a refund due it need not exist',
  due_payment_id VARBINARY(128) NOT NULL DEFAULT '' COMMENT 'payment_id of a refund due, empty for a sale: a reservation is sold once',
  buyer          VARBINARY(128) NOT NULL,
  quantity       INT UNSIGNED   NOT NULL,
  reason         VARCHAR(32) CHARACTER SET ascii NOT NULL DEFAULT '' COMMENT 'why a refund is due',
  paid_at        DATETIME(6)    NULL COMMENT 'as told by the checkout',
  recorded_at    DATETIME(6)    NOT NULL,
  refunded_at    DATETIME(6)    NULL,
  PRIMARY KEY (sale_id, payment_id),
  UNIQUE KEY reservation (sale_id, reservation_id, due_payment_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Events to publish, written by the transaction that made them: one row for all events of one kind in a transaction.
-- A row goes when every event of it was delivered.
CREATE TABLE IF NOT EXISTS flashsale_outbox (
  sale_id         BINARY(16)       NOT NULL,
  outbox_id       BINARY(16)       NOT NULL COMMENT 'UUID version 7',
  kind            TINYINT UNSIGNED NOT NULL COMMENT 'see outbox.go',
  reservation_ids MEDIUMBLOB       NOT NULL COMMENT '16 bytes each, one event each; empty for an event of the sale',
  payment_id      VARBINARY(128)   NOT NULL DEFAULT '' COMMENT 'of a refund due',
  created_at      DATETIME(6)      NOT NULL,
  delivered       INT UNSIGNED     NOT NULL DEFAULT 0 COMMENT 'how many of the events were',
  attempts        INT UNSIGNED     NOT NULL DEFAULT 0,
  not_before      DATETIME(6)      NOT NULL COMMENT 'leased by a publisher, or backing off, until then',
  PRIMARY KEY (sale_id, outbox_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Exact running counts without a hot row: each writer adds to its own row, inside the transaction that moves the units.
-- The sum over a sale's rows is the truth at that commit. The row of line 'load' counts the unit rows ever inserted;
-- that of 'shrink' takes off those that were taken away, and that of 'repair' is what `reserver repair` added.
CREATE TABLE IF NOT EXISTS flashsale_tally (
  sale_id   BINARY(16) NOT NULL,
  line      VARCHAR(128) CHARACTER SET ascii NOT NULL,
  available BIGINT NOT NULL,
  held      BIGINT NOT NULL,
  sold      BIGINT NOT NULL,
  next_unit INT UNSIGNED NOT NULL DEFAULT 1 COMMENT 'where the line looks for fresh units next; a hint, never a truth',
  granted   BIGINT NOT NULL DEFAULT 0 COMMENT 'reservations that the line made: a pod that has seen as many as there are knows all buyers',
  PRIMARY KEY (sale_id, line)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- What tables of versions 1 and 2 lack. MySQL cannot say IF NOT EXISTS of a column: that it is there is an error here, which Migrate
-- takes for success. A change of a table waits until nobody reads it, and all others wait behind it: an audit may read for minutes,
-- so it must not wait for long.
SET SESSION lock_wait_timeout = 3;
ALTER TABLE flashsale_sale ADD COLUMN removed INT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'unit rows taken away by Shrink; unit numbers are not used again';
ALTER TABLE flashsale_sale ADD COLUMN release_at_end BOOLEAN NOT NULL DEFAULT FALSE COMMENT 'holds lapse at the end of the sale, when that comes before their time is over';
ALTER TABLE flashsale_sale ADD COLUMN opened_at DATETIME(6) NULL COMMENT 'when it opened, of a sale that was suspended or resumed since its start; else that is the later of starts_at and loaded_at';
ALTER TABLE flashsale_tally ADD COLUMN granted BIGINT NOT NULL DEFAULT 0 COMMENT 'reservations that the line made: a pod that has seen as many as there are knows all buyers';

CREATE TABLE IF NOT EXISTS flashsale_schema (
  version    INT UNSIGNED NOT NULL,
  applied_at DATETIME(6)  NOT NULL,
  PRIMARY KEY (version)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
