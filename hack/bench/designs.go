package main

// Two ways to keep units in MySQL, in plain SQL, with the same queue, batches and other writes. There is one sale, so its
// id is left out of all keys.

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/admission"
)

var designSchema = []string{
	// "pool": the rows on the shelf are those that are not taken. A claim moves them to design_hold.
	"CREATE TABLE design_pool (unit_no INT UNSIGNED PRIMARY KEY)",
	"CREATE TABLE design_hold (unit_no INT UNSIGNED PRIMARY KEY, reservation_id BINARY(16) NOT NULL)",
	// "in-place": a row per unit for ever, which names the reservation that had it last, zero while fresh; fresh ones are found
	// by a moving start. Those that came back lie behind it and are listed.
	"CREATE TABLE design_unit (unit_no INT UNSIGNED PRIMARY KEY, reservation_id BINARY(16) NOT NULL)",
	"CREATE TABLE design_returned (unit_no INT UNSIGNED PRIMARY KEY)",
	// What both write.
	`CREATE TABLE design_reservation (reservation_id BINARY(16) PRIMARY KEY, buyer VARBINARY(128) NOT NULL, unit_no INT UNSIGNED NOT NULL,
		lapses_at DATETIME(6), KEY lapse (lapses_at))`,
	"CREATE TABLE design_buyer (buyer VARBINARY(128) PRIMARY KEY, reservation_id BINARY(16))",
	"CREATE TABLE design_tally (line VARCHAR(128) PRIMARY KEY, available BIGINT NOT NULL, held BIGINT NOT NULL, next_unit INT UNSIGNED NOT NULL)",
}

const freshUnit = "0x00000000000000000000000000000000"

var designNames = []string{"pool", "in-place"}

// designs compares the two at each size, share sold, and number of clients and processes.
func designs(ctx context.Context, b *bench) error {
	for _, units := range []int64{1000, b.manyUnits()} {
		for _, sold := range soldPercents {
			if err := b.designsOf(ctx, units, sold); err != nil {
				return fmt.Errorf("%d units, %d %% sold: %w", units, sold, err)
			}
		}
	}
	return nil
}

func (b *bench) designsOf(ctx context.Context, units int64, sold int) error {
	dsn, drop, err := b.scratch(ctx)
	if err != nil {
		return err
	}
	defer drop()
	db, err := openSQL(dsn, 2)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	b.say("designs: preparing %d units, %d %% sold", units, sold)
	firstLeft := units*int64(sold)/100 + 1
	hint, from := numbers(units)
	statements := append(slices.Clone(designSchema),
		fmt.Sprintf("INSERT %s INTO design_pool SELECT n FROM %s WHERE n >= %d", hint, from, firstLeft),
		fmt.Sprintf("INSERT %s INTO design_hold SELECT n, 0x01000000000000000000000000000000 FROM %s WHERE n < %d", hint, from, firstLeft),
		fmt.Sprintf("INSERT %s INTO design_unit SELECT n, IF(n < %d, 0x01000000000000000000000000000000, %s) FROM %s", hint, firstLeft, freshUnit, from))
	if err := execAll(ctx, db, statements...); err != nil {
		return err
	}
	for _, returns := range []bool{false, true} {
		for _, c := range []struct{ clients, processes int }{{1, 1}, {64, 1}, {512, 1}, {512, 2}, {512, 4}} {
			b.say("designs: %d units, %d %% sold, returns: %t, %d clients, %d processes", units, sold, returns, c.clients, c.processes)
			seen := map[string][]outcome{}
			for range b.rounds {
				for _, name := range designNames {
					if err := resetDesigns(ctx, db, firstLeft); err != nil {
						return err
					}
					w := wave{System: name, DSN: dsn, Name: "bench", Clients: c.clients, Lines: b.lines, Window: b.window / 5, Returns: returns}
					o, err := b.runWave(ctx, w, c.processes)
					if err == nil {
						err = checkDesign(ctx, db, name, firstLeft)
					}
					if err != nil {
						return fmt.Errorf("%s, %d clients, %d processes: %w", name, c.clients, c.processes, err)
					}
					seen[name] = append(seen[name], o)
				}
			}
			for _, name := range designNames {
				b.add(record{Scenario: "designs", System: name, Durable: true, Clients: c.clients, Units: units, Processes: c.processes, Unit: "claims/s",
					SoldPercent: &sold, Returns: &returns}.of(median(seen[name])))
			}
		}
	}
	return nil
}

// resetDesigns puts back what the last measurement took.
func resetDesigns(ctx context.Context, db *sql.DB, firstLeft int64) error {
	return execAll(ctx, db,
		fmt.Sprintf("INSERT INTO design_pool SELECT unit_no FROM design_hold WHERE unit_no >= %d", firstLeft),
		fmt.Sprintf("DELETE FROM design_hold WHERE unit_no >= %d", firstLeft),
		fmt.Sprintf("UPDATE design_unit SET reservation_id = %s WHERE unit_no >= %d AND reservation_id <> %s", freshUnit, firstLeft, freshUnit),
		"TRUNCATE design_returned", "TRUNCATE design_reservation", "TRUNCATE design_buyer", "TRUNCATE design_tally",
		fmt.Sprintf("INSERT INTO design_tally VALUES ('start', 0, 0, %d)", firstLeft))
}

// checkDesign fails when a unit has two owners, or the count and the rows differ.
func checkDesign(ctx context.Context, db *sql.DB, design string, firstLeft int64) error {
	taken := fmt.Sprintf("SELECT COUNT(*) FROM design_hold WHERE unit_no >= %d", firstLeft)
	if design == "in-place" {
		taken = fmt.Sprintf("SELECT COUNT(*) - (SELECT COUNT(*) FROM design_returned) FROM design_unit WHERE unit_no >= %d AND reservation_id <> %s", firstLeft, freshUnit)
	}
	var rows, live, units, held int64
	err := db.QueryRowContext(ctx, "SELECT ("+taken+`), COUNT(*), COUNT(DISTINCT unit_no), (SELECT SUM(held) FROM design_tally)
		FROM design_reservation WHERE lapses_at IS NOT NULL`).Scan(&rows, &live, &units, &held)
	if err == nil && (rows != live || units != live || held != live) {
		err = fmt.Errorf("%d rows are taken, %d reservations own %d units, %d are counted", rows, live, units, held)
	}
	return err
}

// design is a shelf of either kind.
type design struct {
	db   *sql.DB
	name string
	ask  func(ctx context.Context, buyer string) (uuid.UUID, error)
	stop func()

	take   func(ctx context.Context, tx *sql.Tx, line *designLine, n int) ([]taken, error)
	putOne func(ctx context.Context, tx *sql.Tx, unit int64) error
}

type designLine struct {
	name string
	next int64 // where fresh units begin
}

// taken is a unit with its new owner.
type taken struct {
	unit  int64
	owner uuid.UUID
}

func openDesign(ctx context.Context, name, dsn, process string, lines int) (*design, error) {
	db, err := openSQL(dsn, maxConns)
	if err != nil {
		return nil, err
	}
	d := &design{db: db, name: process, take: takeFromPool, putOne: putIntoPool}
	if name == "in-place" {
		d.take, d.putOne = takeInPlace, putInPlace
	}
	var serves []admission.Serve[string, uuid.UUID]
	for i := range lines {
		line := &designLine{name: fmt.Sprintf("%s/%d", process, i)}
		if err := db.QueryRowContext(ctx, "SELECT MAX(next_unit) FROM design_tally").Scan(&line.next); err != nil {
			return nil, errors.Join(err, db.Close())
		}
		serves = append(serves, func(ctx context.Context, buyers []string) ([]uuid.UUID, error) {
			return d.claimBatch(ctx, line, buyers)
		})
	}
	queue, stop := newQueue(serves...)
	d.ask, d.stop = queue.Ask, stop
	return d, nil
}

func (d *design) close() error {
	d.stop()
	return d.db.Close()
}

func (d *design) claim(ctx context.Context, buyer string) (uuid.UUID, error) {
	r, err := d.ask(ctx, buyer)
	if err == nil && r == uuid.Nil {
		err = errEmpty // as far as it went: units that others have locked do not come free in this benchmark
	}
	return r, err
}

// claimBatch takes a unit for each buyer, in one transaction; those for whom there is none get the zero id.
func (d *design) claimBatch(ctx context.Context, line *designLine, buyers []string) ([]uuid.UUID, error) {
	answers := make([]uuid.UUID, len(buyers))
	err := again(func() error {
		return inTx(ctx, d.db, func(tx *sql.Tx) error {
			clear(answers)
			units, err := d.take(ctx, tx, line, len(buyers))
			if err != nil || len(units) == 0 {
				return err
			}
			n := len(units)
			type row struct {
				buyer string
				taken
			}
			rows := make([]row, n)
			var reservations, owners []any
			lapses := time.Now().UTC().Add(holdTime)
			for i, u := range units {
				answers[i], rows[i] = u.owner, row{buyers[i], u}
				reservations = append(reservations, u.owner[:], buyers[i], u.unit, lapses)
			}
			slices.SortFunc(rows, func(a, b row) int { return cmp.Compare(a.buyer, b.buyer) })
			for _, r := range rows {
				owners = append(owners, r.buyer, r.owner[:])
			}
			if err := write(ctx, tx, "INSERT INTO design_buyer VALUES "+values("(?,?)", n), owners...); err != nil {
				return err
			}
			if err := write(ctx, tx, "INSERT INTO design_reservation VALUES "+values("(?,?,?,?)", n), reservations...); err != nil {
				return err
			}
			return count(ctx, tx, line.name, int64(n), line.next)
		})
	})
	return answers, err
}

// giveBack returns one unit.
func (d *design) giveBack(ctx context.Context, reservation uuid.UUID) error {
	return again(func() error {
		return inTx(ctx, d.db, func(tx *sql.Tx) error {
			var unit int64
			var buyer []byte
			err := tx.QueryRowContext(ctx, "SELECT unit_no, buyer FROM design_reservation WHERE reservation_id = ? FOR UPDATE", reservation[:]).Scan(&unit, &buyer)
			if err != nil {
				return err
			}
			if err := write(ctx, tx, "UPDATE design_reservation SET lapses_at = NULL WHERE reservation_id = ?", reservation[:]); err != nil {
				return err
			}
			if err := write(ctx, tx, "UPDATE design_buyer SET reservation_id = NULL WHERE buyer = ?", buyer); err != nil {
				return err
			}
			if err := d.putOne(ctx, tx, unit); err != nil {
				return err
			}
			return count(ctx, tx, d.name+"/returns", -1, 1)
		})
	})
}

func takeFromPool(ctx context.Context, tx *sql.Tx, _ *designLine, n int) ([]taken, error) {
	units, err := lockUnits(ctx, tx, "SELECT unit_no FROM design_pool ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED", n)
	if err != nil || len(units) == 0 {
		return nil, err
	}
	if err := write(ctx, tx, deleteFrom("design_pool"), listed(units)); err != nil {
		return nil, err
	}
	return units, write(ctx, tx, "INSERT INTO design_hold VALUES "+values("(?,?)", len(units)), pairs(units)...)
}

func putIntoPool(ctx context.Context, tx *sql.Tx, unit int64) error {
	if err := write(ctx, tx, "DELETE FROM design_hold WHERE unit_no = ?", unit); err != nil {
		return err
	}
	return write(ctx, tx, "INSERT INTO design_pool VALUES (?)", unit)
}

func takeInPlace(ctx context.Context, tx *sql.Tx, line *designLine, n int) ([]taken, error) {
	units, err := lockUnits(ctx, tx, "SELECT unit_no FROM design_returned ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED", n)
	if err != nil {
		return nil, err
	}
	if len(units) > 0 {
		if err := write(ctx, tx, deleteFrom("design_returned"), listed(units)); err != nil {
			return nil, err
		}
	}
	if len(units) < n {
		fresh, err := lockUnits(ctx, tx, "SELECT unit_no FROM design_unit WHERE unit_no >= ? AND reservation_id = "+freshUnit+
			" ORDER BY unit_no LIMIT ? FOR UPDATE SKIP LOCKED", line.next, n-len(units))
		if err != nil {
			return nil, err
		}
		if len(fresh) > 0 {
			line.next = fresh[len(fresh)-1].unit + 1
		}
		units = append(units, fresh...)
	}
	if len(units) == 0 {
		return nil, nil
	}
	return units, write(ctx, tx, "INSERT INTO design_unit VALUES "+values("(?,?)", len(units))+
		" ON DUPLICATE KEY UPDATE reservation_id = VALUES(reservation_id)", pairs(units)...)
}

func putInPlace(ctx context.Context, tx *sql.Tx, unit int64) error {
	return write(ctx, tx, "INSERT INTO design_returned VALUES (?)", unit)
}

// lockUnits gives the locked units with new owners.
func lockUnits(ctx context.Context, tx *sql.Tx, query string, args ...any) ([]taken, error) {
	rows, err := tx.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var units []taken
	for rows.Next() {
		t := taken{owner: uuid.Must(uuid.NewV7())}
		if err := rows.Scan(&t.unit); err != nil {
			return nil, err
		}
		units = append(units, t)
	}
	return units, rows.Err()
}

func count(ctx context.Context, tx *sql.Tx, line string, held, next int64) error {
	return write(ctx, tx, `INSERT INTO design_tally VALUES (?,?,?,?) ON DUPLICATE KEY UPDATE available = available + VALUES(available),
		held = held + VALUES(held), next_unit = GREATEST(next_unit, VALUES(next_unit))`, line, -held, held, next)
}

func write(ctx context.Context, tx *sql.Tx, query string, args ...any) error {
	_, err := tx.ExecContext(ctx, query, args...)
	return err
}

// again runs a transaction once more when it was rolled back for another's sake.
func again(f func() error) error {
	err := f()
	for range 10 {
		if !isConflict(err) {
			break
		}
		err = f()
	}
	return err
}

// deleteFrom deletes listed units. They are joined, as in the product: with IN, the server may walk the table, and deadlocks.
func deleteFrom(table string) string {
	return "DELETE t FROM (SELECT unit_no FROM JSON_TABLE(?, '$[*]' COLUMNS (unit_no INT UNSIGNED PATH '$')) AS j) AS v STRAIGHT_JOIN " +
		table + " AS t FORCE INDEX (PRIMARY) ON t.unit_no = v.unit_no"
}

// listed gives units as JSON.
func listed(units []taken) string {
	var b strings.Builder
	for i, u := range units {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(u.unit, 10))
	}
	return "[" + b.String() + "]"
}

func values(row string, n int) string { return strings.TrimSuffix(strings.Repeat(row+",", n), ",") }

func pairs(units []taken) []any {
	var args []any
	for i := range units {
		args = append(args, units[i].unit, units[i].owner[:])
	}
	return args
}
