package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

const (
	loadBatch    = 2000             // unit rows that one transaction inserts
	batchTimeout = 15 * time.Second // for one transaction of long work
)

// Register writes the sale's spec, unless a newer generation was written before: a manager that was paused and still
// believes it leads changes nothing. It waits for claims in flight, so that none is granted under the old spec once it
// has returned. What has happened cannot be edited away: the start of a sale that has opened stays, and an end lies at
// this moment at the earliest.
func (s *Store) Register(ctx context.Context, sale Sale) error {
	return retry(ctx, func() error { return s.inTx(ctx, func(tx *sql.Tx) error { return register(ctx, tx, sale) }) })
}

func register(ctx context.Context, tx *sql.Tx, sale Sale) error {
	// The loader's tally first, as the loader does.
	_, err := tx.ExecContext(ctx, `INSERT INTO flashsale_tally (sale_id, line, available, held, sold) VALUES (?, 'load', 0, 0, 0)
		ON DUPLICATE KEY UPDATE line = line`, id(sale.ID))
	if err != nil {
		return fmt.Errorf("registering the loader's tally: %w", err)
	}
	// MySQL assigns from left to right, so generation comes last. The clock is read with the row's lock held.
	var locked string
	err = tx.QueryRowContext(ctx, "SELECT name FROM flashsale_sale WHERE sale_id = ? FOR UPDATE", id(sale.ID)).Scan(&locked)
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("locking the sale: %w", err)
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO flashsale_sale
		(sale_id, name, sku, units, starts_at, ends_at, hold_ttl_us, max_per_buyer, highest_limit, suspended, draining, generation)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?)
		ON DUPLICATE KEY UPDATE
		sku = IF(generation <= VALUES(generation), VALUES(sku), sku),
		units = IF(generation <= VALUES(generation), VALUES(units), units),
		ends_at = IF(generation > VALUES(generation), ends_at, IF(loaded_at IS NULL OR starts_at > UTC_TIMESTAMP(6), VALUES(ends_at),
			GREATEST(VALUES(ends_at), LEAST(UTC_TIMESTAMP(6), COALESCE(ends_at, UTC_TIMESTAMP(6)))))),
		starts_at = IF(generation > VALUES(generation) OR loaded_at IS NOT NULL AND starts_at <= UTC_TIMESTAMP(6), starts_at, VALUES(starts_at)),
		hold_ttl_us = IF(generation <= VALUES(generation), VALUES(hold_ttl_us), hold_ttl_us),
		max_per_buyer = IF(generation <= VALUES(generation), VALUES(max_per_buyer), max_per_buyer),
		highest_limit = GREATEST(highest_limit, max_per_buyer),
		suspended = IF(generation <= VALUES(generation), VALUES(suspended), suspended),
		draining = draining OR VALUES(draining),
		generation = GREATEST(generation, VALUES(generation))`,
		id(sale.ID), sale.Name, sale.SKU, sale.Units, sale.StartsAt.UTC(), nullTime(sale.EndsAt), sale.HoldTTL.Microseconds(),
		sale.MaxPerBuyer, sale.MaxPerBuyer, sale.Suspended, sale.Draining, sale.Generation)
	if err != nil {
		return fmt.Errorf("registering the sale: %w", err)
	}
	return nil
}

// Load inserts the sale's missing unit rows in transactions of 2,000, until all are there or the context has ended, which
// it looks at between two transactions. It gives how many are loaded. progress, if not nil, is called after each
// transaction. It goes on where any process stopped: loaders of one sale take turns on one row's lock, and the unit's key
// keeps it from existing twice.
func (s *Store) Load(ctx context.Context, sale uuid.UUID, progress func(loaded, units int64)) (loaded int64, err error) {
	for ctx.Err() == nil {
		var units int64
		batch, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
		err := retry(batch, func() (err error) { loaded, units, err = s.loadOnce(batch, sale); return err })
		cancel()
		if err != nil {
			return loaded, err
		}
		if progress != nil {
			progress(loaded, units)
		}
		if loaded >= units {
			return loaded, nil
		}
	}
	return loaded, ctx.Err()
}

func (s *Store) loadOnce(ctx context.Context, sale uuid.UUID) (loaded, units int64, err error) {
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		err := tx.QueryRowContext(ctx, "SELECT available FROM flashsale_tally WHERE sale_id = ? AND line = 'load' FOR UPDATE", id(sale)).Scan(&loaded)
		if errors.Is(err, sql.ErrNoRows) {
			return ErrNoSale
		}
		if err != nil {
			return fmt.Errorf("locking the loader's tally: %w", err)
		}
		if err := tx.QueryRowContext(ctx, "SELECT units FROM flashsale_sale WHERE sale_id = ?", id(sale)).Scan(&units); err != nil {
			return fmt.Errorf("reading how many units to load: %w", err)
		}
		if last := min(loaded+loadBatch, units); last > loaded {
			if _, err := tx.ExecContext(ctx, insertUnits(sale, loaded+1, last)); err != nil {
				return fmt.Errorf("inserting unit rows: %w", err)
			}
			_, err := tx.ExecContext(ctx, "UPDATE flashsale_tally SET available = ? WHERE sale_id = ? AND line = 'load'", last, id(sale))
			if err != nil {
				return fmt.Errorf("counting unit rows: %w", err)
			}
			loaded = last
		}
		if loaded < units {
			return nil
		}
		_, err = tx.ExecContext(ctx, "UPDATE flashsale_sale SET loaded_at = UTC_TIMESTAMP(6) WHERE sale_id = ? AND loaded_at IS NULL", id(sale))
		if err != nil {
			return fmt.Errorf("recording that loading ended: %w", err)
		}
		return nil
	})
	return loaded, units, err
}

// insertUnits writes the values out: placeholders would cost the client more than the server spends on the rows.
func insertUnits(sale uuid.UUID, first, last int64) string {
	var b strings.Builder
	key := "(0x" + strings.ReplaceAll(sale.String(), "-", "") + ","
	b.Grow(int(last-first+1) * (len(key) + 10))
	b.WriteString("INSERT INTO flashsale_unit (sale_id, unit_no) VALUES ")
	for n := first; n <= last; n++ {
		if n > first {
			b.WriteByte(',')
		}
		b.WriteString(key)
		b.WriteString(strconv.FormatInt(n, 10))
		b.WriteByte(')')
	}
	return b.String()
}

const snapshotSQL = `SELECT s.name, s.sku, s.units, s.starts_at, s.ends_at, s.hold_ttl_us, s.max_per_buyer, s.suspended, s.draining,
	s.generation, s.loaded_at, s.closed_at, UTC_TIMESTAMP(6), t.available, t.held, t.sold, t.loaded,
	(SELECT MIN(lapses_at) FROM flashsale_reservation WHERE sale_id = ?)
	FROM flashsale_sale s JOIN (
		SELECT COALESCE(SUM(available), 0) AS available, COALESCE(SUM(held), 0) AS held, COALESCE(SUM(sold), 0) AS sold,
		COALESCE(SUM(IF(line = 'load', available, 0)), 0) AS loaded
		FROM flashsale_tally WHERE sale_id = ?) t
	WHERE s.sale_id = ?`

// Snapshot reads the sale and its counts as of one instant. The cost does not depend on the number of units.
func (s *Store) Snapshot(ctx context.Context, sale uuid.UUID) (*Snapshot, error) {
	return readSnapshot(ctx, s.db, sale)
}

type queryer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func readSnapshot(ctx context.Context, q queryer, sale uuid.UUID) (*Snapshot, error) {
	snap := &Snapshot{Sale: Sale{ID: sale}}
	var ends, loadedAt, closedAt, lapse sql.NullTime
	var ttl int64
	err := q.QueryRowContext(ctx, snapshotSQL, id(sale), id(sale), id(sale)).Scan(&snap.Name, &snap.SKU, &snap.Units, &snap.StartsAt, &ends, &ttl,
		&snap.MaxPerBuyer, &snap.Suspended, &snap.Draining, &snap.Generation, &loadedAt, &closedAt, &snap.Now,
		&snap.Available, &snap.Held, &snap.Sold, &snap.Loaded, &lapse)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, ErrNoSale
	}
	if err != nil {
		return nil, fmt.Errorf("reading the sale: %w", err)
	}
	snap.EndsAt, snap.LoadedAt, snap.ClosedAt, snap.NextLapse = ends.Time, loadedAt.Time, closedAt.Time, lapse.Time
	snap.HoldTTL = time.Duration(ttl) * time.Microsecond
	return snap, nil
}

// CloseSale closes the sale for good, once nothing in it can change any more: no live hold, and every unit sold or the
// window over (or the sale draining). Else it returns ErrNotOver  and changes nothing. Closing twice is not an error.
func (s *Store) CloseSale(ctx context.Context, sale uuid.UUID) error {
	return retry(ctx, func() error { return s.closeOnce(ctx, sale) })
}

func (s *Store) closeOnce(ctx context.Context, sale uuid.UUID) error {
	return s.inTx(ctx, func(tx *sql.Tx) error {
		// Claims hold this row shared until they commit: with the lock taken, the counts are final.
		var name string
		err := tx.QueryRowContext(ctx, "SELECT name FROM flashsale_sale WHERE sale_id = ? FOR UPDATE", id(sale)).Scan(&name)
		if errors.Is(err, sql.ErrNoRows) {
			return ErrNoSale
		}
		if err != nil {
			return fmt.Errorf("locking the sale: %w", err)
		}
		snap, err := readSnapshot(ctx, tx, sale)
		if err != nil {
			return err
		}
		soldOut := snap.Loaded == snap.Units && snap.Sold == snap.Units
		if snap.Held > 0 || !soldOut && snap.Gate(snap.Now) != GateClosed {
			return ErrNotOver
		}
		_, err = tx.ExecContext(ctx, "UPDATE flashsale_sale SET closed_at = UTC_TIMESTAMP(6) WHERE sale_id = ? AND closed_at IS NULL", id(sale))
		if err != nil {
			return fmt.Errorf("closing the sale: %w", err)
		}
		return nil
	})
}

// SoldOutAt is when the last unit was sold; zero while any is not.
func (s *Store) SoldOutAt(ctx context.Context, sale uuid.UUID) (time.Time, error) {
	var at sql.NullTime
	err := s.db.QueryRowContext(ctx, `SELECT MAX(l.confirmed_at) FROM flashsale_sale s JOIN flashsale_ledger l ON l.sale_id = s.sale_id
		WHERE s.sale_id = ? AND s.units = (SELECT SUM(sold) FROM flashsale_tally WHERE sale_id = ?)`, id(sale), id(sale)).Scan(&at)
	if err != nil {
		return time.Time{}, fmt.Errorf("reading when the last unit was sold: %w", err)
	}
	return at.Time, nil
}

// Sales lists the sales in the database.
func (s *Store) Sales(ctx context.Context) ([]uuid.UUID, error) {
	rows, err := s.db.QueryContext(ctx, "SELECT sale_id FROM flashsale_sale ORDER BY name, sale_id")
	if err != nil {
		return nil, fmt.Errorf("listing the sales: %w", err)
	}
	defer func() { _ = rows.Close() }()
	var sales []uuid.UUID
	for rows.Next() {
		var key []byte
		if err := rows.Scan(&key); err != nil {
			return nil, fmt.Errorf("listing the sales: %w", err)
		}
		sales = append(sales, uuid.UUID(key))
	}
	return sales, rows.Err()
}

// saleTables are the tables whose rows belong to one sale, in the order Purge empties them: the sale's own row last,
// so that a purge that was interrupted is found again.
var saleTables = []string{"flashsale_unit", "flashsale_returned", "flashsale_reservation", "flashsale_buyer", "flashsale_ledger", "flashsale_tally", "flashsale_sale"}

// Purge deletes every row of the sale, the ledger included, in transactions of 5,000, until none is left or the context
// has ended, which it looks at between two. It can be repeated.
func (s *Store) Purge(ctx context.Context, sale uuid.UUID) error {
	for _, table := range saleTables {
		for n := int64(1); n > 0; {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			batch, cancel := context.WithTimeout(context.WithoutCancel(ctx), batchTimeout)
			r, err := s.db.ExecContext(batch, "DELETE FROM "+table+" WHERE sale_id = ? LIMIT 5000", id(sale))
			cancel()
			if err == nil {
				n, err = r.RowsAffected()
			}
			if err != nil {
				return fmt.Errorf("deleting from %s: %w", table, err)
			}
		}
	}
	return nil
}
