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
  suspended     BOOLEAN         NOT NULL DEFAULT FALSE,
  draining      BOOLEAN         NOT NULL DEFAULT FALSE COMMENT 'the object is being deleted: no new holds',
  generation    BIGINT          NOT NULL COMMENT 'metadata.generation of the spec written last; an older one never overwrites it',
  loaded_at     DATETIME(6)     NULL     COMMENT 'when the last unit row was in',
  closed_at     DATETIME(6)     NULL,
  PRIMARY KEY (sale_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row per unit, updated in place. A fresh unit has never been held; a returned one also stands in flashsale_returned.
CREATE TABLE IF NOT EXISTS flashsale_unit (
  sale_id        BINARY(16)       NOT NULL,
  unit_no        INT UNSIGNED     NOT NULL,
  state          TINYINT UNSIGNED NOT NULL DEFAULT 0 COMMENT '0 fresh, 1 held, 2 sold, 3 returned',
  reservation_id BINARY(16)       NOT NULL DEFAULT 0x00000000000000000000000000000000 COMMENT 'owner while held or sold; fixed size, so that updates stay in place',
  PRIMARY KEY (sale_id, unit_no)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Units that came back. Fresh units are found by a moving start on flashsale_unit; these lie behind it.
CREATE TABLE IF NOT EXISTS flashsale_returned (
  sale_id BINARY(16)   NOT NULL,
  unit_no INT UNSIGNED NOT NULL,
  PRIMARY KEY (sale_id, unit_no)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS flashsale_reservation (
  sale_id        BINARY(16)       NOT NULL,
  reservation_id BINARY(16)       NOT NULL COMMENT 'UUID version 7, made by the client',
  buyer          VARBINARY(128)   NOT NULL COMMENT 'compared byte by byte',
  quantity       INT UNSIGNED     NOT NULL,
  unit_nos       VARCHAR(9000) CHARACTER SET ascii NOT NULL COMMENT 'the units, comma separated',
  state          TINYINT UNSIGNED NOT NULL COMMENT '1 held, 2 confirmed, 3 released, 4 expired',
  granted_at     DATETIME(6)      NOT NULL,
  expires_at     DATETIME(6)      NOT NULL,
  lapses_at      DATETIME(6)      NULL COMMENT 'expires_at while held, NULL after: the index holds live holds only',
  ended_at       DATETIME(6)      NULL,
  PRIMARY KEY (sale_id, reservation_id),
  KEY lapse (sale_id, lapses_at)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row per buyer who ever held: what makes one live reservation per buyer and the limit hold across pods.
CREATE TABLE IF NOT EXISTS flashsale_buyer (
  sale_id        BINARY(16)     NOT NULL,
  buyer          VARBINARY(128) NOT NULL,
  held           INT UNSIGNED   NOT NULL,
  sold           INT UNSIGNED   NOT NULL DEFAULT 0,
  reservation_id BINARY(16)     NULL COMMENT 'the live reservation, or NULL',
  granted_at     DATETIME(6)    NULL,
  expires_at     DATETIME(6)    NULL,
  PRIMARY KEY (sale_id, buyer)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- One row per confirmed reservation. A payment takes effect once, for ever.
CREATE TABLE IF NOT EXISTS flashsale_ledger (
  sale_id        BINARY(16)     NOT NULL,
  payment_id     VARBINARY(128) NOT NULL,
  reservation_id BINARY(16)     NOT NULL,
  buyer          VARBINARY(128) NOT NULL,
  quantity       INT UNSIGNED   NOT NULL,
  paid_at        DATETIME(6)    NULL COMMENT 'as told by the checkout',
  confirmed_at   DATETIME(6)    NOT NULL,
  PRIMARY KEY (sale_id, payment_id),
  UNIQUE KEY reservation (sale_id, reservation_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

-- Exact running counts without a hot row: each writer adds to its own row, inside the transaction that moves the units.
-- The sum over a sale's rows is the truth at that commit. The row of line 'load' counts the unit rows ever inserted.
CREATE TABLE IF NOT EXISTS flashsale_tally (
  sale_id   BINARY(16) NOT NULL,
  line      VARCHAR(128) CHARACTER SET ascii NOT NULL,
  available BIGINT NOT NULL,
  held      BIGINT NOT NULL,
  sold      BIGINT NOT NULL,
  next_unit INT UNSIGNED NOT NULL DEFAULT 1 COMMENT 'where the line looks for fresh units next; a hint, never a truth',
  PRIMARY KEY (sale_id, line)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;

CREATE TABLE IF NOT EXISTS flashsale_schema (
  version    INT UNSIGNED NOT NULL,
  applied_at DATETIME(6)  NOT NULL,
  PRIMARY KEY (version)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
