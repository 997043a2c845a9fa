package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
)

// server is a MySQL of the harness's own, which hack/mysql keeps: it starts again when it was killed.
type server struct {
	script string
	name   string
	config *mysql.Config
	admin  *sql.DB
}

// startServer starts the instance of that name, or takes the one that runs. Stop it, also after an error.
func startServer(ctx context.Context, root, name string) (*server, error) {
	s := &server{script: filepath.Join(root, "hack", "mysql", "mysql.sh"), name: name}
	dsn, err := s.run("up")
	if err != nil {
		return s, err
	}
	if s.config, err = mysql.ParseDSN(strings.TrimSpace(dsn)); err != nil {
		return s, fmt.Errorf("reading the server's DSN: %w", err)
	}
	s.config.DBName, s.config.ParseTime, s.config.InterpolateParams = "", true, true
	s.config.Timeout, s.config.ReadTimeout = 2*time.Second, 5*time.Second
	s.config.Logger = &mysql.NopLogger{} // it is killed all the time
	if s.admin, err = openPool(s.config); err != nil {
		return s, err
	}
	return s, s.setIsolation(ctx, "READ-COMMITTED")
}

// openPool keeps the configuration's logger, which a DSN cannot carry.
func openPool(config *mysql.Config) (*sql.DB, error) {
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

// run runs a command of the script, also when the harness is being interrupted: half a start would leave a server behind.
func (s *server) run(command string) (string, error) {
	cmd := exec.Command(s.script, command)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the harness
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "FLASHSALE_MYSQL_") { // a server of the user's is not killed
			cmd.Env = append(cmd.Env, e)
		}
	}
	cmd.Env = append(cmd.Env, "FLASHSALE_MYSQL_NAME="+s.name)
	var out, log strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &log
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("mysql.sh %s: %w\n%s", command, err, log.String())
	}
	return out.String() + log.String(), nil
}

// stop ends the server and removes its data.
func (s *server) stop() error {
	if s.admin != nil {
		_ = s.admin.Close()
	}
	_, err := s.run("down")
	return err
}

var pidOf = regexp.MustCompile(`pid (\d+)`)

// signal sends one to the server, once it runs.
func (s *server) signal(ctx context.Context, signal syscall.Signal) (pid int, err error) {
	err = eventually(ctx, time.Minute, "MySQL runs", func() error {
		out, err := s.run("status")
		if err != nil {
			return err
		}
		found := pidOf.FindStringSubmatch(out)
		if found == nil {
			return fmt.Errorf("mysql.sh status names no pid: %s", out)
		}
		if pid, err = strconv.Atoi(found[1]); err != nil {
			return err
		}
		return syscall.Kill(pid, signal)
	})
	return pid, err
}

// setIsolation sets the server's default, also for its next start.
func (s *server) setIsolation(ctx context.Context, level string) error {
	return eventually(ctx, time.Minute, "the default isolation is set", func() error {
		_, err := s.admin.ExecContext(ctx, "SET PERSIST transaction_isolation = '"+level+"'")
		return err
	})
}

func (s *server) isolation(ctx context.Context) (level string, err error) {
	err = s.admin.QueryRowContext(ctx, "SELECT @@GLOBAL.transaction_isolation").Scan(&level)
	return level, err
}

// awake waits until the server answers.
func (s *server) awake(ctx context.Context) error {
	return eventually(ctx, time.Minute, "MySQL answers", func() error { return s.admin.PingContext(ctx) })
}

// clock turns the database's time into the harness's. Both read the machine's, one the wall and one the monotonic clock.
type clock struct {
	least, most time.Duration // what to take off the time since the epoch
}

func (c clock) earliest(t time.Time) int64 { return t.UnixNano() - c.most.Nanoseconds() }
func (c clock) latest(t time.Time) int64   { return t.UnixNano() - c.least.Nanoseconds() }

// compare measures the clocks: the database read its own between two instants of ours.
func (s *server) compare(ctx context.Context, now func() int64) (c clock, dbNow time.Time, err error) {
	before := now()
	err = s.admin.QueryRowContext(ctx, "SELECT UTC_TIMESTAMP(6)").Scan(&dbNow)
	after := now()
	if err != nil {
		return c, dbNow, fmt.Errorf("reading the database's clock: %w", err)
	}
	return clock{least: time.Duration(dbNow.UnixNano() - after), most: time.Duration(dbNow.UnixNano() - before)}, dbNow, nil
}

// join gives bounds that hold for both measurements, in case the wall clock was corrected between them.
func (c clock) join(o clock) clock { return clock{min(c.least, o.least), max(c.most, o.most)} }

// sale is one sale in a database of its own.
type sale struct {
	inventory.Sale
	server *server
	schema string
	store  *inventory.Store
	db     *sql.DB
}

// newSale makes the database and the sale, with all units loaded.
func (s *server) newSale(ctx context.Context, schema string, spec inventory.Sale) (*sale, error) {
	if _, err := s.admin.ExecContext(ctx, "CREATE DATABASE "+schema); err != nil {
		return nil, fmt.Errorf("creating a database: %w", err)
	}
	config := s.config.Clone()
	config.DBName = schema
	store, err := inventory.Open(inventory.Options{DSN: config.FormatDSN()})
	if err != nil {
		return nil, err
	}
	sale := &sale{Sale: spec, server: s, schema: schema, store: store}
	if sale.db, err = openPool(config); err != nil {
		return sale, err
	}
	if _, err := store.Setup(ctx); err != nil {
		return sale, fmt.Errorf("making the tables: %w", err)
	}
	if err := store.Register(ctx, spec); err != nil {
		return sale, err
	}
	_, err = store.Load(ctx, spec.ID, nil)
	return sale, err
}

// dsn is how a process reaches the sale's database at an address.
func (s *sale) dsn(address string) string {
	config := s.server.config.Clone()
	config.DBName, config.Addr = s.schema, address
	return config.FormatDSN()
}

func (s *sale) drop(ctx context.Context) error {
	_ = s.store.Close()
	_ = s.db.Close()
	_, err := s.server.admin.ExecContext(ctx, "DROP DATABASE "+s.schema)
	return err
}

// audit gives the invariants that the rows break.
func (s *sale) audit(ctx context.Context) ([]string, error) {
	report, err := s.store.Audit(ctx, s.ID)
	if err != nil {
		return nil, err
	}
	var broken []string
	for _, c := range report.Failed() {
		broken = append(broken, fmt.Sprintf("%s, %s: %s", c.ID, c.Claim, strings.Join(c.Breaches, "; ")))
	}
	return broken, nil
}

// quiet waits until no transaction is open: the processes are gone, and the server is done with what they sent.
func (s *server) quiet(ctx context.Context) error {
	return eventually(ctx, time.Minute, "no transaction is open", func() error {
		// MySQL keeps this table as it was for as long as it is read every 100 ms.
		if !pause(ctx, 150*time.Millisecond) {
			return ctx.Err()
		}
		var open sql.NullString
		err := s.admin.QueryRowContext(ctx, `SELECT GROUP_CONCAT('one since ', trx_started, ', ', trx_state, ': ', COALESCE(trx_query, 'idle'))
			FROM information_schema.INNODB_TRX`).Scan(&open)
		if err == nil && open.Valid {
			err = errors.New(open.String)
		}
		return err
	})
}

type reservationRow struct {
	id, buyer                       string
	quantity                        int
	letter                          byte // of the model
	grantedAt, expiresAt, changedAt time.Time
}

type ledgerRow struct {
	payment, reservation string
	due                  string // why it is to be refunded
	recordedAt           time.Time
}

// rows reads every reservation and payment.
func (s *sale) rows(ctx context.Context) (reservations []reservationRow, payments []ledgerRow, err error) {
	id := s.ID
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		var rid, buyer []byte
		var r reservationRow
		var state int
		if err := rows.Scan(&rid, &buyer, &r.quantity, &state, &r.grantedAt, &r.expiresAt, &r.changedAt); err != nil {
			return err
		}
		r.id, r.buyer = uuid.UUID(rid).String(), string(buyer)
		r.letter = []byte{absent, held, confirmed, released, expired, restocked, withheld}[state]
		reservations = append(reservations, r)
		return nil
	}, "SELECT reservation_id, buyer, quantity, state, granted_at, expires_at, changed_at FROM flashsale_reservation WHERE sale_id = ?", id[:])
	if err != nil {
		return nil, nil, fmt.Errorf("reading the reservations: %w", err)
	}
	err = each(ctx, s.db, func(rows *sql.Rows) error {
		var p ledgerRow
		var rid []byte
		if err := rows.Scan(&p.payment, &rid, &p.due, &p.recordedAt); err != nil {
			return err
		}
		p.reservation = uuid.UUID(rid).String()
		payments = append(payments, p)
		return nil
	}, "SELECT payment_id, reservation_id, reason, recorded_at FROM flashsale_ledger WHERE sale_id = ?", id[:])
	if err != nil {
		return nil, nil, fmt.Errorf("reading the ledger: %w", err)
	}
	return reservations, payments, nil
}

func each(ctx context.Context, db *sql.DB, scan func(*sql.Rows) error, query string, args ...any) (err error) {
	rows, err := db.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// eventually tries until it goes well; what names the condition that was waited for.
func eventually(ctx context.Context, patience time.Duration, what string, try func() error) error {
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%v passed and still not: %s: %w", patience, what, err)
		}
		if !pause(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// pause waits; false if the context ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
