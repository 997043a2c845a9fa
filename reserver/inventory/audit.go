package inventory

import (
	"context"
	"database/sql"
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
	{"I1", "unit rows are numbered 1..n without gaps, n is what the loader counted and at most what is declared", `
		SELECT CONCAT('rows ', COUNT(*), ', first ', COALESCE(MIN(u.unit_no), 0), ', last ', COALESCE(MAX(u.unit_no), 0), ', loader counted ', t.available, ', declared ', s.units)
		FROM flashsale_sale s JOIN flashsale_tally t ON t.sale_id = s.sale_id AND t.line = 'load' LEFT JOIN flashsale_unit u ON u.sale_id = s.sale_id
		WHERE s.sale_id = ? GROUP BY t.available, s.units
		HAVING COUNT(u.unit_no) <> t.available OR COALESCE(MAX(u.unit_no), 0) <> t.available OR t.available > s.units`},
	{"I1", "a unit is returned exactly when the list of returned units has it", `
		SELECT CONCAT('unit ', u.unit_no, ' is returned but not listed') FROM flashsale_unit u
		LEFT JOIN flashsale_returned r ON r.sale_id = u.sale_id AND r.unit_no = u.unit_no
		WHERE u.sale_id = ? AND u.state = 3 AND r.unit_no IS NULL
		UNION ALL
		SELECT CONCAT('unit ', r.unit_no, ' is listed as returned but its state is ', COALESCE(u.state, 'missing')) FROM flashsale_returned r
		LEFT JOIN flashsale_unit u ON u.sale_id = r.sale_id AND u.unit_no = r.unit_no
		WHERE r.sale_id = ? AND (u.state IS NULL OR u.state <> 3) LIMIT 10`},
	{"I2", "every held or sold unit has one owner, live or confirmed, who owns exactly his quantity", `
		SELECT CONCAT('reservation ', HEX(o.reservation_id), ' has ', o.n, ' units in state ', o.state, ', its quantity is ', COALESCE(r.quantity, 'missing'), ', its state ', COALESCE(r.state, 'missing'))
		FROM (SELECT reservation_id, state, COUNT(*) AS n FROM flashsale_unit WHERE sale_id = ? AND state IN (1, 2) GROUP BY reservation_id, state) o
		LEFT JOIN flashsale_reservation r ON r.sale_id = ? AND r.reservation_id = o.reservation_id
		WHERE r.state IS NULL OR r.state <> o.state OR r.quantity <> o.n LIMIT 10`},
	{"I2", "live and confirmed reservations own as many units as there are held and sold ones", `
		SELECT CONCAT('reservations in state ', w.state, ' ask for ', COALESCE(w.n, 0), ' units, rows say ', COALESCE(h.n, 0)) FROM
		(SELECT x.state, SUM(r.quantity) AS n FROM (SELECT 1 AS state UNION SELECT 2) x
			LEFT JOIN flashsale_reservation r ON r.sale_id = ? AND r.state = x.state GROUP BY x.state) w
		LEFT JOIN (SELECT state, COUNT(*) AS n FROM flashsale_unit WHERE sale_id = ? GROUP BY state) h ON h.state = w.state
		WHERE COALESCE(w.n, 0) <> COALESCE(h.n, 0)`},
	{"I3", "sold and held units are at most the units declared", `
		SELECT CONCAT('held and sold ', COUNT(*), ', declared ', s.units) FROM flashsale_sale s JOIN flashsale_unit u ON u.sale_id = s.sale_id
		WHERE s.sale_id = ? AND u.state IN (1, 2) GROUP BY s.units HAVING COUNT(*) > s.units`},
	{"I4", "no hold is live 2 s after its time", `
		SELECT CONCAT('reservation ', HEX(reservation_id), ' expired at ', lapses_at) FROM flashsale_reservation
		WHERE sale_id = ? AND lapses_at < NOW_OF_SNAPSHOT - INTERVAL 2 SECOND ORDER BY lapses_at LIMIT 10`},
	{"I5", "every confirmed reservation has one ledger row of its quantity, and no other has one", `
		SELECT CONCAT('reservation ', HEX(r.reservation_id), ' in state ', r.state, ', ledger quantity ', COALESCE(l.quantity, 'missing')) FROM flashsale_reservation r
		LEFT JOIN flashsale_ledger l ON l.sale_id = r.sale_id AND l.reservation_id = r.reservation_id
		WHERE r.sale_id = ? AND (r.state = 2) <> (l.quantity IS NOT NULL AND l.quantity = r.quantity AND l.buyer = r.buyer)
		UNION ALL
		SELECT CONCAT('payment ', HEX(l.payment_id), ' is of no reservation') FROM flashsale_ledger l
		LEFT JOIN flashsale_reservation r ON r.sale_id = l.sale_id AND r.reservation_id = l.reservation_id
		WHERE l.sale_id = ? AND r.reservation_id IS NULL LIMIT 10`},
	{"I6", "no buyer has more than the largest maxPerBuyer there was, or two live reservations", `
		SELECT CONCAT('buyer ', HEX(r.buyer), ' has ', SUM(r.quantity), ' units in ', SUM(r.state = 1), ' live reservations') FROM flashsale_reservation r
		JOIN flashsale_sale s ON s.sale_id = r.sale_id WHERE r.sale_id = ? AND r.state IN (1, 2) GROUP BY r.buyer, s.highest_limit
		HAVING SUM(r.quantity) > s.highest_limit OR SUM(r.state = 1) > 1 LIMIT 10`},
	{"I6", "what is kept of each buyer equals his reservations", `
		SELECT CONCAT('buyer ', HEX(b.buyer), ' is said to hold ', b.held, ' and have bought ', b.sold, ', reservations say ', COALESCE(r.held, 0), ' and ', COALESCE(r.sold, 0)) FROM flashsale_buyer b
		LEFT JOIN (SELECT buyer, SUM(IF(state = 1, quantity, 0)) AS held, SUM(IF(state = 2, quantity, 0)) AS sold, MAX(IF(state = 1, reservation_id, NULL)) AS live
			FROM flashsale_reservation WHERE sale_id = ? GROUP BY buyer) r ON r.buyer = b.buyer
		WHERE b.sale_id = ? AND (b.held <> COALESCE(r.held, 0) OR b.sold <> COALESCE(r.sold, 0) OR NOT b.reservation_id <=> r.live) LIMIT 10`},
	{"I8", "the running counts equal the rows", `
		SELECT CONCAT('counted ', t.a, ' available, ', t.h, ' held, ', t.s, ' sold; rows say ', u.a, ', ', u.h, ', ', u.s) FROM
		(SELECT COALESCE(SUM(available), 0) AS a, COALESCE(SUM(held), 0) AS h, COALESCE(SUM(sold), 0) AS s FROM flashsale_tally WHERE sale_id = ?) t,
		(SELECT COALESCE(SUM(state IN (0, 3)), 0) AS a, COALESCE(SUM(state = 1), 0) AS h, COALESCE(SUM(state = 2), 0) AS s FROM flashsale_unit WHERE sale_id = ?) u
		WHERE t.a <> u.a OR t.h <> u.h OR t.s <> u.s`},
	{"I9", "no reservation was granted before the start or at or after the end", `
		SELECT CONCAT('reservation ', HEX(r.reservation_id), ' granted at ', r.granted_at) FROM flashsale_reservation r JOIN flashsale_sale s ON s.sale_id = r.sale_id
		WHERE r.sale_id = ? AND (r.granted_at < s.starts_at OR r.granted_at >= s.ends_at) LIMIT 10`},
}

// Audit proves the invariants from the rows, in one consistent snapshot, without a lock. A sale that does not exist is
// ErrNoSale. I7 and I10 speak of answers, which rows do not show.
func (s *Store) Audit(ctx context.Context, sale uuid.UUID) (*Report, error) {
	tx, err := s.audits.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("beginning the audit: %w", err)
	}
	defer func() { _ = tx.Rollback() }()
	snap, err := readSnapshot(ctx, tx, sale) // the first read fixes the snapshot for all others
	if err != nil {
		return nil, err
	}
	report := &Report{Sale: sale, Name: snap.Name, TakenAt: snap.Now, Units: snap.Units, OK: true}
	err = tx.QueryRowContext(ctx, `SELECT COALESCE(SUM(state IN (0, 3)), 0), COALESCE(SUM(state = 1), 0), COALESCE(SUM(state = 2), 0)
		FROM flashsale_unit WHERE sale_id = ?`, id(sale)).Scan(&report.Available, &report.Held, &report.Sold)
	if err != nil {
		return nil, fmt.Errorf("counting units: %w", err)
	}
	for _, c := range auditChecks {
		breaches, err := runCheck(ctx, tx, strings.ReplaceAll(c.query, "NOW_OF_SNAPSHOT", snap.Now.Format("TIMESTAMP'2006-01-02 15:04:05.000000'")), sale)
		if err != nil {
			return nil, fmt.Errorf("checking %s, %s: %w", c.id, c.claim, err)
		}
		report.Checks = append(report.Checks, Check{ID: c.id, Claim: c.claim, OK: len(breaches) == 0, Breaches: breaches})
		report.OK = report.OK && len(breaches) == 0
	}
	return report, nil
}

func runCheck(ctx context.Context, tx *sql.Tx, query string, sale uuid.UUID) ([]string, error) {
	var args []any
	for _, r := range query {
		if r == '?' {
			args = append(args, id(sale))
		}
	}
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var breaches []string
	for rows.Next() {
		var b string
		if err := rows.Scan(&b); err != nil {
			return nil, err
		}
		breaches = append(breaches, b)
	}
	return breaches, rows.Err()
}
