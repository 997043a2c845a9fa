package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
)

// The usual ways, as textbooks have them. All sell item 1.

// openTables gives a pool of one connection per client, up to 64, on a database with the statements run.
func openTables(ctx context.Context, b *bench, clients int, statements ...string) (*sql.DB, func(), error) {
	dsn, drop, err := b.scratch(ctx)
	if err != nil {
		return nil, nil, err
	}
	db, err := openSQL(dsn, min(clients, 64))
	if err != nil {
		drop()
		return nil, nil, err
	}
	done := func() { _ = db.Close(); drop() }
	if err := execAll(ctx, db, statements...); err != nil {
		done()
		return nil, nil, err
	}
	return db, done, nil
}

const counterStock = 100_000_000

// openCounter is one row with the number of units left, changed by each claim, and a row per hold.
func openCounter(forUpdate bool) func(context.Context, *bench, int) (seller, error) {
	return func(ctx context.Context, b *bench, clients int) (seller, error) {
		db, done, err := openTables(ctx, b, clients,
			"CREATE TABLE stock (item INT PRIMARY KEY, available INT NOT NULL)",
			"CREATE TABLE hold (item INT, buyer VARCHAR(64), expires_at DATETIME(6) NOT NULL, PRIMARY KEY (item, buyer))",
			fmt.Sprintf("INSERT INTO stock VALUES (1, %d)", counterStock))
		if err != nil {
			return seller{}, err
		}
		claim := func(ctx context.Context, buyer string) error {
			return sqlClaim(inTx(ctx, db, func(tx *sql.Tx) error {
				if forUpdate {
					var available int
					if err := tx.QueryRowContext(ctx, "SELECT available FROM stock WHERE item = 1 FOR UPDATE").Scan(&available); err != nil {
						return err
					}
					if available < 1 {
						return errEmpty
					}
				}
				r, err := tx.ExecContext(ctx, "UPDATE stock SET available = available - 1 WHERE item = 1 AND available > 0")
				if err != nil {
					return err
				}
				if n, err := r.RowsAffected(); err != nil || n == 0 {
					return errEmpty
				}
				_, err = tx.ExecContext(ctx, "INSERT INTO hold VALUES (1, ?, ?)", buyer, time.Now().Add(holdTime))
				return err
			}))
		}
		return seller{claim: claim, units: counterStock, close: done}, nil
	}
}

// skipLockedRows are few, for the scan gets slower with each unit that is taken.
const skipLockedRows = 100_000

// openSkipLocked is a row per unit, and one claim per transaction.
func openSkipLocked(ctx context.Context, b *bench, clients int) (seller, error) {
	hint, from := numbers(skipLockedRows)
	db, done, err := openTables(ctx, b, clients,
		`CREATE TABLE unit (id BIGINT AUTO_INCREMENT PRIMARY KEY, item INT NOT NULL, status VARCHAR(16) NOT NULL DEFAULT 'available',
			holder VARCHAR(64), expires_at DATETIME(6), INDEX shelf (item, status, expires_at))`,
		fmt.Sprintf("INSERT %s INTO unit (item) SELECT 1 FROM %s", hint, from),
		"ANALYZE TABLE unit")
	if err != nil {
		return seller{}, err
	}
	claim := func(ctx context.Context, buyer string) error {
		return sqlClaim(inTx(ctx, db, func(tx *sql.Tx) error {
			var unit int64
			err := tx.QueryRowContext(ctx, `SELECT id FROM unit WHERE item = 1 AND status = 'available'
				ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED`).Scan(&unit)
			if errors.Is(err, sql.ErrNoRows) {
				return errMiss // others have locked what was looked at: there is more than can be sold
			}
			if err != nil {
				return err
			}
			_, err = tx.ExecContext(ctx, "UPDATE unit SET status = 'held', holder = ?, expires_at = ? WHERE id = ?",
				buyer, time.Now().Add(holdTime), unit)
			return err
		}))
	}
	return seller{claim: claim, units: skipLockedRows, close: done}, nil
}

// sqlClaim makes a claim that MySQL rolled back for another's sake one to be tried again.
func sqlClaim(err error) error {
	if isConflict(err) {
		return errMiss
	}
	return err
}

const (
	redisStock    = 1_000_000_000
	redisStockKey = "stock:1"
)

// redisConns is the best of 4 to 512 connections for one command at a time.
const redisConns = 32

// openRedis gives a client of an empty Redis that holds the stock: a pool of connections that carry one command at a time,
// as shops use it. With --pipeline, commands that are issued at the same time share round trips instead, as claims share
// transactions in the product.
func openRedis(ctx context.Context, b *bench, clients int) (redis.Cmdable, func(), error) {
	options := *b.redis.Options()
	options.PoolSize = min(clients, redisConns)
	options.MaxRetries = -1 // a claim must not be counted twice
	client := redis.NewClient(&options)
	done := func() {
		_ = client.FlushDB(context.WithoutCancel(ctx)).Err() // the next run flushes as well
		_ = client.Close()
	}
	err := errors.Join(client.FlushDB(ctx).Err(), client.Set(ctx, redisStockKey, redisStock, 0).Err(), luaClaim.Load(ctx, client).Err())
	if err != nil || !b.pipeline || clients == 1 {
		return client, done, err
	}
	pipeliner, err := client.AutoPipeline()
	return pipeliner, func() { _ = pipeliner.Close(); done() }, err
}

func holdKey(buyer string) string { return "hold:1:" + buyer }

// openRedisDecr is a counter, and a key with a lifetime per hold.
func openRedisDecr(ctx context.Context, b *bench, clients int) (seller, error) {
	client, done, err := openRedis(ctx, b, clients)
	if err != nil {
		done()
		return seller{}, err
	}
	claim := func(ctx context.Context, buyer string) error {
		left, err := client.Decr(ctx, redisStockKey).Result()
		if err != nil {
			return err
		}
		if left < 0 {
			return errors.Join(errEmpty, client.Incr(ctx, redisStockKey).Err())
		}
		return client.Set(ctx, holdKey(buyer), "1", holdTime).Err()
	}
	return seller{claim: claim, units: redisStock, close: done}, nil
}

// luaClaim does the same in one step, and answers a buyer who holds already with his hold.
var luaClaim = redis.NewScript(`
local held = redis.call('GET', KEYS[2])
if held then return held end
if tonumber(redis.call('GET', KEYS[1])) < 1 then return '' end
redis.call('DECR', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
return ARGV[1]`)

func openRedisLua(ctx context.Context, b *bench, clients int) (seller, error) {
	client, done, err := openRedis(ctx, b, clients)
	if err != nil {
		done()
		return seller{}, err
	}
	claim := func(ctx context.Context, buyer string) error {
		held, err := luaClaim.EvalSha(ctx, client, []string{redisStockKey, holdKey(buyer)}, "1", int(holdTime.Seconds())).Text()
		if err == nil && held == "" {
			return errEmpty
		}
		return err
	}
	return seller{claim: claim, units: redisStock, close: done}, nil
}

// openRedisLedger is the script, and then a committed row in MySQL, so that an answered claim is not lost.
func openRedisLedger(ctx context.Context, b *bench, clients int) (seller, error) {
	db, done, err := openTables(ctx, b, clients,
		"CREATE TABLE ledger (item INT, buyer VARCHAR(64), expires_at DATETIME(6) NOT NULL, PRIMARY KEY (item, buyer))")
	if err != nil {
		return seller{}, err
	}
	lua, err := openRedisLua(ctx, b, clients)
	if err != nil {
		done()
		return seller{}, err
	}
	claim := func(ctx context.Context, buyer string) error {
		if err := lua.claim(ctx, buyer); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, "INSERT INTO ledger VALUES (1, ?, ?)", buyer, time.Now().Add(holdTime))
		return err
	}
	return seller{claim: claim, units: redisStock, close: func() { lua.close(); done() }}, nil
}
