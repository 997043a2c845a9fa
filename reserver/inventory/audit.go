package inventory

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Report is what an audit found. It is what `reserver audit` prints.
type Report struct {
	Sale    uuid.UUID `json:"sale"`
	Name    string    `json:"name"`
	TakenAt time.Time `json:"takenAt"` // by the database's clock
	Units   int64     `json:"units"`   // as declared
	Counts            // from the unit rows
	OK      bool      `json:"ok"`
	Checks  []Check   `json:"checks"`
}

// Check is one thing an audit proved, or the rows that break it (the first ten).
type Check struct {
	ID       string   `json:"id"` // the invariant of docs/design.md
	Claim    string   `json:"claim"`
	OK       bool     `json:"ok"`
	Breaches []string `json:"breaches,omitempty"`
}

// Failed gives the checks that did not hold.
func (r *Report) Failed() []Check {
	var failed []Check
	for _, c := range r.Checks {
		if !c.OK {
			failed = append(failed, c)
		}
	}
	return failed
}

// auditChecks are queries that give one text per breach. Each takes the sale's id as often as it has placeholders;
// NOW_OF_SNAPSHOT is the time of the snapshot, for the statements before may have taken long.
var auditChecks = []struct{ id, claim, query string }{
	{"I1", "unit rows are those of 1..n that were not taken away, n is what the loader counted, and they are at most what is declared", `
		SELECT CONCAT('rows ', u.n, ', first ', u.low, ', last ', u.high, ', loader counted ', t.available, ', taken away ', s.removed, ', declared ', s.units)
		FROM flashsale_sale s JOIN flashsale_tally t ON t.sale_id = s.sale_id AND t.line = 'load'
		JOIN (SELECT COUNT(*) AS n, COALESCE(MIN(unit_no), 0) AS low, COALESCE(MAX(unit_no), 0) AS high FROM flashsale_unit WHERE sale_id = ?) u
		WHERE s.sale_id = ? AND (u.n + s.removed <> t.available OR u.n > 0 AND u.low = 0 OR u.high > t.available OR u.n > s.units)`},
	{"I1", "a unit that was given is listed as returned exactly when its last reservation does not have it any more", `
		SELECT CONCAT('unit ', u.unit_no, ' of reservation ', HEX(u.reservation_id), ' in state ', COALESCE(r.state, 'missing'), IF(b.unit_no IS NULL, ' is not listed as returned', ' is listed as returned'))
		FROM flashsale_unit u LEFT JOIN flashsale_reservation r ON r.sale_id = u.sale_id AND r.reservation_id = u.reservation_id
		LEFT JOIN flashsale_returned b ON b.sale_id = u.sale_id AND b.unit_no = u.unit_no
		WHERE u.sale_id = ? AND u.reservation_id <> 0x00000000000000000000000000000000
		AND (r.state IS NULL AND u.reservation_id <> 0xffffffffffffffffffffffffffffffff
		OR r.state IN (1, 2, 6) AND b.unit_no IS NOT NULL OR COALESCE(r.state, 3) IN (3, 4, 5) AND b.unit_no IS NULL) LIMIT 10`},
	{"I1", "every unit listed as returned was given before", `
		SELECT CONCAT('unit ', b.unit_no, IF(u.unit_no IS NULL, ' has no row', ' is fresh')) FROM flashsale_returned b
		LEFT JOIN flashsale_unit u ON u.sale_id = b.sale_id AND u.unit_no = b.unit_no
		WHERE b.sale_id = ? AND (u.unit_no IS NULL OR u.reservation_id = 0x00000000000000000000000000000000) LIMIT 10`},
	{"I2", "a live or sold reservation is named as the owner by exactly as many units as its quantity, those it lists", `
		SELECT CONCAT('reservation ', HEX(r.reservation_id), ' in state ', r.state, ' of quantity ', r.quantity, ' lists units ', LEFT(r.unit_nos, 40), ' and is named by ', COALESCE(o.n, 0))
		FROM flashsale_reservation r LEFT JOIN (SELECT reservation_id, COUNT(*) AS n, MIN(unit_no) AS low FROM flashsale_unit WHERE sale_id = ?
			AND reservation_id <> 0x00000000000000000000000000000000 GROUP BY reservation_id) o ON o.reservation_id = r.reservation_id
		WHERE r.sale_id = ? AND r.state IN (1, 2, 6) AND (NOT o.n <=> r.quantity OR NOT FIND_IN_SET(o.low, r.unit_nos)
			OR LENGTH(r.unit_nos) - LENGTH(REPLACE(r.unit_nos, ',', '')) + 1 <> r.quantity) LIMIT 10`},
	{"I3", "sold and held units are at most the units declared", `
		SELECT CONCAT('held and sold ', r.n, ', declared ', s.units) FROM flashsale_sale s
		JOIN (SELECT COALESCE(SUM(quantity), 0) AS n FROM flashsale_reservation WHERE sale_id = ? AND state IN (1, 2, 6)) r
		WHERE s.sale_id = ? AND r.n > s.units`},
	{"I4", "no hold is live 2 s after its time", `
		SELECT CONCAT('reservation ', HEX(reservation_id), ' expired at ', expires_at) FROM flashsale_reservation
		WHERE sale_id = ? AND state = 1 AND expires_at < NOW_OF_SNAPSHOT - INTERVAL 2 SECOND LIMIT 10`},
	{"I4", "as many holds as are live stand in waves, or more: a sweeper will come to each", `
		SELECT CONCAT(r.n, ' live holds, ', w.n, ' places in waves') FROM
		(SELECT COUNT(*) AS n FROM flashsale_reservation WHERE sale_id = ? AND state = 1) r
		JOIN (SELECT COALESCE(SUM(LENGTH(reservation_ids) DIV 16), 0) AS n FROM flashsale_wave WHERE sale_id = ?) w WHERE r.n > w.n`},
	{"I5", "every sold reservation has one ledger row, of its buyer and quantity, and no other has one", `
		SELECT CONCAT('reservation ', HEX(r.reservation_id), ' in state ', r.state, ', ledger quantity ', COALESCE(l.quantity, 'missing')) FROM flashsale_reservation r
		LEFT JOIN flashsale_ledger l ON l.sale_id = r.sale_id AND l.reservation_id = r.reservation_id AND l.due_payment_id = ''
		WHERE r.sale_id = ? AND (r.state IN (2, 5, 6)) <> (l.quantity IS NOT NULL AND l.quantity = r.quantity AND l.buyer = r.buyer)
		UNION ALL
		SELECT CONCAT('payment ', HEX(l.payment_id), ' is of no reservation') FROM flashsale_ledger l
		LEFT JOIN flashsale_reservation r ON r.sale_id = l.sale_id AND r.reservation_id = l.reservation_id
		WHERE l.sale_id = ? AND (l.due_payment_id = '' AND r.reservation_id IS NULL OR l.due_payment_id NOT IN ('', l.payment_id)) LIMIT 10`},
	{"I6", "no buyer has more than the largest maxPerBuyer there was, or two live reservations", `
		SELECT CONCAT('buyer ', HEX(r.buyer), ' has ', SUM(r.quantity), ' units in ', SUM(r.state = 1), ' live reservations') FROM flashsale_reservation r
		JOIN flashsale_sale s ON s.sale_id = r.sale_id
		WHERE r.sale_id = ? AND (r.state IN (2, 6) OR r.state = 1 AND r.expires_at > NOW_OF_SNAPSHOT) GROUP BY r.buyer, s.highest_limit
		HAVING SUM(r.quantity) > s.highest_limit OR SUM(r.state = 1) > 1 LIMIT 10`},
	{"I6", "each buyer has one newest reservation, and it tells how many others there are and what they bought", `
		SELECT CONCAT('buyer ', HEX(buyer), ' has ', n, ' reservations, ', newest, ' of them newest, said to come after ', COALESCE(earlier, 'none'), '; the others bought ', others, ', said ', COALESCE(bought, 'nothing'))
		FROM (SELECT buyer, COUNT(*) AS n, SUM(superseded = 0) AS newest, SUM(IF(superseded > 0 AND state IN (2, 6), quantity, 0)) AS others,
			MAX(IF(superseded = 0, bought, NULL)) AS bought, MAX(IF(superseded = 0, earlier, NULL)) AS earlier
			FROM flashsale_reservation WHERE sale_id = ? GROUP BY buyer) b
		WHERE newest <> 1 OR earlier <> n - 1 OR bought <> others LIMIT 10`},
	{"I8", "the running counts equal the rows", countsDiffer},
	{"I9", "no reservation was granted before the start or at or after the end", `
		SELECT CONCAT('reservation ', HEX(r.reservation_id), ' granted at ', r.granted_at) FROM flashsale_reservation r JOIN flashsale_sale s ON s.sale_id = r.sale_id
		WHERE r.sale_id = ? AND (r.granted_at < s.starts_at OR r.granted_at >= s.ends_at) LIMIT 10`},
}

// countedSQL gives the running counts, and rowCountsSQL what the rows say: units that are fresh or returned are available.
const (
	countedSQL = `SELECT COALESCE(SUM(available), 0) AS available, COALESCE(SUM(held), 0) AS held, COALESCE(SUM(sold), 0) AS sold
		FROM flashsale_tally WHERE sale_id = ?`
	rowCountsSQL = `SELECT (SELECT COUNT(*) FROM flashsale_unit WHERE sale_id = ? AND reservation_id = 0x00000000000000000000000000000000)
		+ (SELECT COUNT(*) FROM flashsale_returned WHERE sale_id = ?) AS available,
		COALESCE((SELECT SUM(quantity) FROM flashsale_reservation WHERE sale_id = ? AND state = 1), 0) AS held,
		COALESCE((SELECT SUM(quantity) FROM flashsale_reservation WHERE sale_id = ? AND state IN (2, 6)), 0) AS sold`
	countsDiffer = `SELECT CONCAT('counted ', t.available, ' available, ', t.held, ' held, ', t.sold, ' sold; rows say ', r.available, ', ', r.held, ', ', r.sold)
		FROM (` + countedSQL + `) t JOIN (` + rowCountsSQL + `) r WHERE t.available <> r.available OR t.held <> r.held OR t.sold <> r.sold`
)

// inSnapshot runs f on one consistent snapshot of the database, without locks.
func (s *Store) inSnapshot(ctx context.Context, caller string, f func(q *queries) error) error {
	tx, err := s.audits.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return fmt.Errorf("beginning a snapshot: %w", err)
	}
	defer func() { _ = tx.Rollback() }()
	return f(&queries{q: tx, comment: commentFor(caller)})
}

// Audit proves the invariants from the rows, in one consistent snapshot, without a lock. A sale that does not exist is
// ErrNoSale. I7 and I10 speak of answers, which rows do not show.
func (s *Store) Audit(ctx context.Context, sale uuid.UUID) (*Report, error) {
	report := &Report{Sale: sale, OK: true}
	err := s.inSnapshot(ctx, "audit", func(q *queries) error {
		snap, err := readSnapshot(ctx, q, sale) // the first read fixes the snapshot for all others
		if err != nil {
			return err
		}
		report.Name, report.TakenAt, report.Units = snap.Name, snap.Now, snap.Units
		err = q.row(ctx, rowCountsSQL, saleArgs(rowCountsSQL, sale)...).Scan(&report.Available, &report.Held, &report.Sold)
		if err != nil {
			return fmt.Errorf("counting units: %w", err)
		}
		for _, c := range auditChecks {
			query := strings.ReplaceAll(c.query, "NOW_OF_SNAPSHOT", snap.Now.Format("TIMESTAMP'2006-01-02 15:04:05.000000'"))
			var breaches []string
			err := q.each(ctx, func(rows *sql.Rows) error {
				var b string
				err := rows.Scan(&b)
				breaches = append(breaches, b)
				return err
			}, query, saleArgs(query, sale)...)
			if err != nil {
				return fmt.Errorf("checking %s, %s: %w", c.id, c.claim, err)
			}
			report.Checks = append(report.Checks, Check{ID: c.id, Claim: c.claim, OK: len(breaches) == 0, Breaches: breaches})
			report.OK = report.OK && len(breaches) == 0
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return report, nil
}

// saleArgs gives the sale's id for every placeholder of a query.
func saleArgs(query string, sale uuid.UUID) []any {
	args := make([]any, strings.Count(query, "?"))
	for i := range args {
		args[i] = id(sale)
	}
	return args
}

// Repair makes the running counts equal the rows again, and touches nothing else; it gives by how much. The difference
// is taken from one snapshot, and whoever moves units changes both sides alike: so it holds while the sale goes on.
func (s *Store) Repair(ctx context.Context, sale uuid.UUID) (changed Counts, err error) {
	err = s.inTx(ctx, "repair", func(tx *queries) error {
		// The lock keeps loaders, Shrink and other repairs out; what they have done is in the snapshot.
		var loaded int64
		err := tx.row(ctx, "SELECT available FROM flashsale_tally WHERE sale_id = ? AND line = 'load' FOR UPDATE", id(sale)).Scan(&loaded)
		if errors.Is(err, sql.ErrNoRows) {
			return ErrNoSale
		}
		if err != nil {
			return fmt.Errorf("locking the loader's tally: %w", err)
		}
		var rows, removed int64
		err = s.inSnapshot(ctx, "repair", func(q *queries) error {
			query := `SELECT r.available - t.available, r.held - t.held, r.sold - t.sold, (SELECT COUNT(*) FROM flashsale_unit WHERE sale_id = ?),
				(SELECT removed FROM flashsale_sale WHERE sale_id = ?) FROM (` + countedSQL + ") t JOIN (" + rowCountsSQL + ") r"
			return q.row(ctx, query, saleArgs(query, sale)...).Scan(&changed.Available, &changed.Held, &changed.Sold, &rows, &removed)
		})
		if err != nil {
			return fmt.Errorf("comparing counts and rows: %w", err)
		}
		_, err = tx.run(ctx, "UPDATE flashsale_tally SET available = ? WHERE sale_id = ? AND line = 'load'", rows+removed, id(sale))
		if err != nil {
			return fmt.Errorf("counting unit rows: %w", err)
		}
		rest := changed
		rest.Available -= rows + removed - loaded
		return tx.change(ctx, tally(sale, "repair", rest, 0, 0))
	})
	return changed, err
}

// Summary tells of a sale what its counts do not.
type Summary struct {
	FirstGrantAt time.Time // when the first reservation was granted; zero without any
	PeakGrants   int64     // the largest number of reservations granted within one second of the database's clock
	RefundsDue   int64     // payments that are due to be refunded, and were not yet
}

// Summary reads all reservations and payments of a sale, in one consistent snapshot, without a lock.
func (s *Store) Summary(ctx context.Context, sale uuid.UUID) (*Summary, error) {
	summary := &Summary{}
	err := s.inSnapshot(ctx, "summary", func(q *queries) error {
		if _, err := readSnapshot(ctx, q, sale); err != nil {
			return err
		}
		var first sql.NullTime
		err := q.row(ctx, `SELECT MIN(first_at), COALESCE(MAX(grants), 0), (SELECT COUNT(*) FROM flashsale_ledger WHERE sale_id = ? AND due_payment_id <> '' AND refunded_at IS NULL)
			FROM (SELECT MIN(granted_at) AS first_at, COUNT(*) AS grants FROM flashsale_reservation WHERE sale_id = ? GROUP BY TO_SECONDS(granted_at)) AS seconds`,
			id(sale), id(sale)).Scan(&first, &summary.PeakGrants, &summary.RefundsDue)
		if err != nil {
			return fmt.Errorf("summing the sale up: %w", err)
		}
		summary.FirstGrantAt = first.Time
		return nil
	})
	if err != nil {
		return nil, err
	}
	return summary, nil
}
