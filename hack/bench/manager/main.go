// Command manager measures the operator with many sales: how fast it takes them under its care, what an idle one costs,
// how soon an edit is acted upon, and what memory and connections it needs. It runs the operator as a process of its own,
// under its own rights, against a real API server and a real MySQL.
package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/go-sql-driver/mysql"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	sales "flashsale.dev/operator/api/v1alpha1"
)

const usage = `usage: manager [flags]

Needs FLASHSALE_MYSQL_DSN (root@tcp(host:port)/), whose user may create users and databases, and KUBEBUILDER_ASSETS, a folder with
etcd, kube-apiserver and kubectl. "make bench-manager" provides both.

Flags:
`

const (
	namespaces = 10
	// The operator gets a database user of its own, so that its connections can be counted.
	databaseUser, databaseName = "flashsale_bench_manager", "flashsale_bench_manager"
)

// bench is one run.
type bench struct {
	sales, live, edits int
	idle               time.Duration
	asJSON             bool
	begin              time.Time

	root, work, kubeconfig, metrics string
	k8s                             client.WithWatch
	admin                           *sql.DB
	dsn                             string // of the operator
	manager                         *exec.Cmd
	connections                     atomic.Int64 // of the operator, at most

	mu      sync.Mutex
	seen    map[types.NamespacedName]*sales.FlashSale // the latest
	writes  map[types.NamespacedName]int              // changes seen since the last reset
	changed chan struct{}                             // closed and made anew at each change
	rows    *tabwriter.Writer
}

func main() { os.Exit(command(os.Args[1:])) }

func command(args []string) int {
	b := &bench{begin: time.Now(), seen: map[types.NamespacedName]*sales.FlashSale{}, writes: map[types.NamespacedName]int{}, changed: make(chan struct{})}
	flags := flag.NewFlagSet("manager", flag.ContinueOnError)
	flags.IntVar(&b.sales, "sales", 1000, "FlashSales in the cluster")
	flags.IntVar(&b.live, "live", 20, "of them live at once")
	flags.IntVar(&b.edits, "edits", 200, "edits of idle ones, whose effect is waited for")
	flags.DurationVar(&b.idle, "idle", time.Minute, "how long all are idle, to count what that costs; 1h for a real hour")
	flags.BoolVar(&b.asJSON, "json", false, "print one JSON object per figure, and nothing else, to stdout")
	flags.StringVar(&b.root, "root", ".", "folder of the operator's module")
	flags.Usage = func() { _, _ = fmt.Fprint(flags.Output(), usage); flags.PrintDefaults() }
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if flags.NArg() > 0 || b.sales < 1 || b.live < 0 || b.edits < 1 || b.live+b.edits > b.sales || b.idle <= 0 {
		fmt.Fprintln(os.Stderr, "manager: no arguments, and --sales at least --live and --edits together; --help lists the flags")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "manager: %v\n", err)
		return 1
	}
	return 0
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "bench-manager: %5s %s\n", time.Since(b.begin).Round(time.Second), fmt.Sprintf(format, args...))
}

// figure is one line of the report; aim is what it is held to, if anything.
type figure struct {
	Scenario string  `json:"scenario"`
	Case     string  `json:"case"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Aim      string  `json:"aim,omitempty"`
	Sales    int     `json:"sales"`
	Live     int     `json:"live"`
}

func (b *bench) add(name string, value float64, unit, aim string) {
	if b.asJSON {
		_ = json.NewEncoder(os.Stdout).Encode(figure{"manager", name, value, unit, aim, b.sales, b.live})
		return
	}
	_, _ = fmt.Fprintf(b.rows, "  %s\t%s\t%s\t%s\n", name, strconv.FormatFloat(value, 'f', -1, 64), unit, aim)
}

func (b *bench) run(ctx context.Context) (err error) {
	log.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	if b.work, err = os.MkdirTemp("", "bench-manager-"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(b.work) }()
	stopDatabase, err := b.startDatabase(ctx)
	if err != nil {
		return err
	}
	defer stopDatabase()
	stopAPI, err := b.startAPI(ctx)
	if err != nil {
		return err
	}
	defer stopAPI()
	if err := b.header(ctx); err != nil {
		return err
	}
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	go b.watch(running)
	go b.countConnections(running)
	if err := b.startManager(ctx); err != nil {
		return err
	}
	defer b.stopManager(syscall.SIGKILL)
	b.rows = tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', 0)
	for _, measure := range []func(context.Context) error{b.arm, b.restIdle, b.goLive, b.edit, b.restart} {
		if err := measure(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
	}
	b.add("database connections at most", float64(b.connections.Load()), "connections", "bounded: one database, 8")
	return b.rows.Flush()
}

// startDatabase makes a user and an empty database for the operator.
func (b *bench) startDatabase(ctx context.Context) (stop func(), err error) {
	config, err := mysql.ParseDSN(os.Getenv("FLASHSALE_MYSQL_DSN"))
	if err != nil || config.Addr == "" || os.Getenv("FLASHSALE_MYSQL_DSN") == "" {
		return nil, fmt.Errorf("FLASHSALE_MYSQL_DSN must be user:password@tcp(host:port)/database: %w", err)
	}
	config.DBName = ""
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return nil, err
	}
	b.admin = sql.OpenDB(connector)
	clean := []string{"DROP DATABASE IF EXISTS " + databaseName, "DROP USER IF EXISTS " + databaseUser}
	for _, q := range append(clean, "CREATE DATABASE "+databaseName, "CREATE USER "+databaseUser+" IDENTIFIED BY 'bench'", "GRANT ALL ON "+databaseName+".* TO "+databaseUser) {
		if _, err := b.admin.ExecContext(ctx, q); err != nil {
			_ = b.admin.Close()
			return nil, fmt.Errorf("preparing the database: %s: %w", q, err)
		}
	}
	b.dsn = fmt.Sprintf("%s:bench@tcp(%s)/%s", databaseUser, config.Addr, databaseName)
	return func() {
		for _, q := range clean {
			if _, err := b.admin.ExecContext(context.WithoutCancel(ctx), q); err != nil {
				b.say("cleaning the database: %v", err)
			}
		}
		_ = b.admin.Close()
	}, nil
}

// startAPI starts an API server with the CRD and the operator's rights.
func (b *bench) startAPI(ctx context.Context) (stop func(), err error) {
	b.say("starting an API server")
	env := &envtest.Environment{CRDDirectoryPaths: []string{filepath.Join(b.root, "config", "crd", "bases")}, ErrorIfCRDPathMissing: true}
	config, err := env.Start()
	if err != nil {
		return nil, fmt.Errorf("starting an API server from KUBEBUILDER_ASSETS: %w", err)
	}
	stop = func() { _ = env.Stop() }
	defer func() {
		if err != nil {
			stop()
		}
	}()
	config.QPS, config.Burst = 1000, 2000
	scheme := kruntime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), sales.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	if b.k8s, err = client.NewWithWatch(config, client.Options{Scheme: scheme}); err != nil {
		return nil, err
	}
	admin, err := env.AddUser(envtest.User{Name: "bench", Groups: []string{"system:masters"}}, config)
	if err != nil {
		return nil, err
	}
	text, err := admin.KubeConfig()
	if err != nil {
		return nil, err
	}
	b.kubeconfig = filepath.Join(b.work, "kubeconfig")
	if err := os.WriteFile(b.kubeconfig, text, 0o600); err != nil {
		return nil, err
	}
	if err := b.k8s.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "flashsale-system"}}); err != nil {
		return nil, err
	}
	kubectl := exec.CommandContext(ctx, filepath.Join(os.Getenv("KUBEBUILDER_ASSETS"), "kubectl"), "--kubeconfig", b.kubeconfig, "apply", "-k", filepath.Join(b.root, "config", "rbac"))
	if out, err := kubectl.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("applying the operator's rights: %w: %s", err, out)
	}
	// The operator's process has its ServiceAccount's rights and no others.
	as, err := clientcmd.Load(text)
	if err != nil {
		return nil, err
	}
	for _, user := range as.AuthInfos {
		user.Impersonate = "system:serviceaccount:flashsale-system:flashsale-manager"
		user.ImpersonateGroups = []string{"system:serviceaccounts", "system:serviceaccounts:flashsale-system", "system:authenticated"}
	}
	if err := clientcmd.WriteToFile(*as, filepath.Join(b.work, "manager.kubeconfig")); err != nil {
		return nil, err
	}
	build := exec.CommandContext(ctx, "go", "-C", b.root, "build", "-o", filepath.Join(b.work, "manager"), ".")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("building the operator: %w: %s", err, out)
	}
	return stop, nil
}

// header says on what is measured.
func (b *bench) header(ctx context.Context) error {
	var version, flush, syncs, name, value string
	if err := b.admin.QueryRowContext(ctx, "SELECT VERSION()").Scan(&version); err != nil {
		return err
	}
	for variable, to := range map[string]*string{"innodb_flush_log_at_trx_commit": &flush, "sync_binlog": &syncs} {
		if err := b.admin.QueryRowContext(ctx, "SHOW GLOBAL VARIABLES LIKE '"+variable+"'").Scan(&name, &value); err != nil {
			return err
		}
		*to = value
	}
	out := os.Stdout
	if b.asJSON {
		out = os.Stderr
	}
	_, err := fmt.Fprintf(out, "%d cores for the operator, the API server, etcd and MySQL; %s; MySQL %s, innodb_flush_log_at_trx_commit=%s, sync_binlog=%s\n%d sales, %d of them live\n\n",
		runtime.NumCPU(), runtime.Version(), version, flush, syncs, b.sales, b.live)
	return err
}

// watch follows all sales. The API server may end a watch at any time; a new one begins with what is there.
func (b *bench) watch(ctx context.Context) {
	for ctx.Err() == nil {
		w, err := b.k8s.Watch(ctx, &sales.FlashSaleList{})
		if err != nil {
			b.say("watching the sales: %v", err)
			wait(ctx, time.Second)
			continue
		}
		for event := range w.ResultChan() {
			if sale, ok := event.Object.(*sales.FlashSale); ok {
				b.see(sale)
			}
		}
	}
}

func (b *bench) see(sale *sales.FlashSale) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k := client.ObjectKeyFromObject(sale)
	if before := b.seen[k]; before != nil && before.ResourceVersion == sale.ResourceVersion {
		return
	}
	b.seen[k] = sale
	b.writes[k]++
	close(b.changed)
	b.changed = make(chan struct{})
}

// until waits for a condition over what the watch shows.
func (b *bench) until(ctx context.Context, what string, done func() (have, want int)) error {
	for last := time.Now(); ; {
		b.mu.Lock()
		have, want := done()
		changed := b.changed
		b.mu.Unlock()
		if have >= want {
			return nil
		}
		if time.Since(last) > 5*time.Second {
			b.say("%s: %d of %d", what, have, want)
			last = time.Now()
		}
		select {
		case <-changed:
		case <-time.After(5 * time.Second):
		case <-ctx.Done():
			return errors.New("interrupted")
		}
	}
}

// count gives how many of the sales are so.
func (b *bench) count(so func(*sales.FlashSale) bool) (n int) {
	for _, s := range b.seen {
		if so(s) {
			n++
		}
	}
	return n
}

// resetWrites forgets the changes seen.
func (b *bench) resetWrites() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.writes)
}

func (b *bench) startManager(ctx context.Context) error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	address := listener.Addr().String()
	_ = listener.Close()
	b.metrics = "http://" + address + "/metrics"
	logs, err := os.OpenFile(filepath.Join(b.work, "manager.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = logs.Close() }() // the process has its own
	b.manager = exec.CommandContext(ctx, filepath.Join(b.work, "manager"), "--kubeconfig="+filepath.Join(b.work, "manager.kubeconfig"),
		"--leader-elect=false", "--metrics-bind-address="+address, "--metrics-secure=false", "--health-probe-bind-address=0", "--reserver-image=flashsale:bench")
	b.manager.Stdout, b.manager.Stderr = logs, logs
	return b.manager.Start()
}

func (b *bench) stopManager(with os.Signal) {
	_ = b.manager.Process.Signal(with)
	_ = b.manager.Wait()
}

// countConnections keeps the largest number of connections that the operator had.
func (b *bench) countConnections(ctx context.Context) {
	for ctx.Err() == nil {
		var n int64
		err := b.admin.QueryRowContext(ctx, "SELECT COUNT(*) FROM performance_schema.processlist WHERE user = ?", databaseUser).Scan(&n)
		if err == nil {
			b.connections.Store(max(b.connections.Load(), n))
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func key(i int) types.NamespacedName {
	return types.NamespacedName{Namespace: fmt.Sprintf("bench-%d", i%namespaces), Name: fmt.Sprintf("sale-%d", i)}
}

func seesSpec(s *sales.FlashSale) bool { return s.Status.ObservedGeneration == s.Generation }

// arm creates the sales, all a day ahead, and waits until they are loaded.
func (b *bench) arm(ctx context.Context) error {
	b.say("creating %d sales", b.sales)
	began := time.Now()
	for n := range namespaces {
		name := key(n).Namespace
		secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "sales-db", Namespace: name}, StringData: map[string]string{"dsn": b.dsn}}
		if err := errors.Join(b.k8s.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}), b.k8s.Create(ctx, secret)); err != nil {
			return err
		}
	}
	next, failed := atomic.Int64{}, make([]error, 16)
	var creators sync.WaitGroup
	for c := range failed {
		creators.Go(func() {
			for i := int(next.Add(1)) - 1; i < b.sales && failed[c] == nil; i = int(next.Add(1)) - 1 {
				sale := &sales.FlashSale{ObjectMeta: metav1.ObjectMeta{Name: key(i).Name, Namespace: key(i).Namespace}, Spec: sales.FlashSaleSpec{
					SKU: "sku", Units: 5, StartTime: metav1.NewTime(time.Now().Add(24 * time.Hour)), HoldTTL: metav1.Duration{Duration: 10 * time.Minute},
					Database:  sales.DatabaseSpec{SecretRef: sales.SecretReference{Name: "sales-db"}},
					Admission: sales.AdmissionSpec{TrustedProxies: []string{"10.0.0.0/8"}},
					Reserver:  sales.ReserverSpec{Warmup: metav1.Duration{Duration: time.Minute}}, Sweep: sales.SweepSpec{Interval: metav1.Duration{Duration: time.Second}}}}
				failed[c] = b.k8s.Create(ctx, sale)
			}
		})
	}
	creators.Wait()
	if err := errors.Join(failed...); err != nil {
		return fmt.Errorf("creating the sales: %w", err)
	}
	created := time.Since(began)
	err := b.until(ctx, "loaded and armed", func() (int, int) {
		return b.count(func(s *sales.FlashSale) bool { return s.Status.Phase == sales.PhaseScheduled && seesSpec(s) }), b.sales
	})
	if err != nil {
		return err
	}
	b.add("create them all", seconds(created), "s", "")
	b.add("until all are loaded and armed, from the first create", seconds(time.Since(began)), "s", "")
	return nil
}

// restIdle counts what idle sales cost.
func (b *bench) restIdle(ctx context.Context) error {
	b.say("all are idle for %v", b.idle)
	wait(ctx, 3*time.Second) // the events of the last changes
	before, err := b.scrape(ctx)
	if err != nil {
		return err
	}
	b.resetWrites()
	began := time.Now()
	wait(ctx, b.idle)
	after, err := b.scrape(ctx)
	if err != nil {
		return err
	}
	hours := time.Since(began).Hours() * float64(b.sales)
	b.mu.Lock()
	changes := 0
	for _, n := range b.writes {
		changes += n
	}
	b.mu.Unlock()
	b.add(fmt.Sprintf("idle for %v: reconciles per sale and hour", b.idle), round((after.reconciles-before.reconciles)/hours), "reconciles", "")
	b.add(fmt.Sprintf("idle for %v: API writes, of all sales together", b.idle), after.writes-before.writes, "writes", "0")
	b.add(fmt.Sprintf("idle for %v: changes of sales that a watch saw", b.idle), float64(changes), "changes", "0")
	return b.addMemory("all idle")
}

// goLive starts the live ones, plays their kubelet, and counts what they cost.
func (b *bench) goLive(ctx context.Context) error {
	b.say("%d sales go live", b.live)
	isLive := func(s *sales.FlashSale) bool { return s.Status.Phase == sales.PhaseLive && s.Status.Endpoint != "" }
	for i := range b.live {
		patch := []byte(`{"spec":{"startTime":"` + time.Now().UTC().Format(time.RFC3339) + `"}}`)
		sale := &sales.FlashSale{ObjectMeta: metav1.ObjectMeta{Name: key(i).Name, Namespace: key(i).Namespace}}
		if err := b.k8s.Patch(ctx, sale, client.RawPatch(types.MergePatchType, patch)); err != nil {
			return fmt.Errorf("starting a sale: %w", err)
		}
	}
	if err := b.until(ctx, "live", func() (int, int) { return b.count(isLive), b.live }); err != nil {
		return err
	}
	for i := range b.live {
		for _, name := range []string{key(i).Name + "-reserver", key(i).Name + "-sweeper"} {
			d := &appsv1.Deployment{}
			if err := b.k8s.Get(ctx, types.NamespacedName{Namespace: key(i).Namespace, Name: name}, d); err != nil {
				return fmt.Errorf("a live sale lacks its Deployment: %w", err)
			}
			d.Status.Replicas, d.Status.ReadyReplicas, d.Status.AvailableReplicas = *d.Spec.Replicas, *d.Spec.Replicas, *d.Spec.Replicas
			if err := b.k8s.Status().Update(ctx, d); err != nil {
				return fmt.Errorf("playing the kubelet: %w", err)
			}
		}
	}
	ready := func(s *sales.FlashSale) bool {
		return isLive(s) && s.Status.Reservers != nil && s.Status.Reservers.Ready == s.Status.Reservers.Desired
	}
	if err := b.until(ctx, "live with their pods ready", func() (int, int) { return b.count(ready), b.live }); err != nil {
		return err
	}
	wait(ctx, 3*time.Second)
	before, err := b.scrape(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	wait(ctx, 35*time.Second) // children are applied again after 30
	after, err := b.scrape(ctx)
	if err != nil {
		return err
	}
	if minutes := time.Since(began).Minutes() * float64(b.live); minutes > 0 {
		b.add("live: reconciles per sale and minute", round((after.reconciles-before.reconciles)/minutes), "reconciles", "")
		b.add("live without a buyer: API writes per sale and minute", round((after.writes-before.writes)/minutes), "writes", "")
	}
	return nil
}

// edit changes idle sales one by one, and waits for each to be acted upon, while the others live.
func (b *bench) edit(ctx context.Context) error {
	b.say("%d edits", b.edits)
	var took []time.Duration
	for i := range b.edits {
		k := key(b.live + i)
		sale := &sales.FlashSale{ObjectMeta: metav1.ObjectMeta{Name: k.Name, Namespace: k.Namespace}}
		began := time.Now()
		if err := b.k8s.Patch(ctx, sale, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"units":6}}`))); err != nil {
			return fmt.Errorf("editing a sale: %w", err)
		}
		err := b.until(ctx, "edits acted upon", func() (int, int) {
			if s := b.seen[k]; s.Generation >= sale.Generation && seesSpec(s) && s.Status.Inventory.Loaded == 6 {
				return 1, 1
			}
			return 0, 1
		})
		if err != nil {
			return err
		}
		took = append(took, time.Since(began))
		wait(ctx, 50*time.Millisecond)
	}
	slices.Sort(took)
	at := func(p float64) float64 { return round(took[int(p*float64(len(took)-1))].Seconds() * 1000) }
	b.add("from an edit to its unit loaded and shown: median", at(0.5), "ms", "")
	b.add("from an edit to its unit loaded and shown: p99", at(0.99), "ms", "<= 1000")
	b.add("from an edit to its unit loaded and shown: longest", at(1), "ms", "")
	return b.addMemory("after the edits, some live")
}

// restart measures how long a new operator takes to look at every sale, and what it writes.
func (b *bench) restart(ctx context.Context) error {
	b.say("the operator is started anew")
	b.stopManager(syscall.SIGTERM)
	b.resetWrites()
	began := time.Now()
	if err := b.startManager(ctx); err != nil {
		return err
	}
	for {
		now, err := b.scrape(ctx)
		if err == nil && now.reconciles >= float64(b.sales) {
			break
		}
		if time.Since(began) > 2*time.Minute {
			return fmt.Errorf("two minutes after its start the operator has not looked at every sale: %w", err)
		}
		wait(ctx, 20*time.Millisecond)
	}
	b.add("from a new start to every sale looked at", seconds(time.Since(began)), "s", "")
	b.mu.Lock()
	defer b.mu.Unlock()
	idle := 0
	for i := b.live; i < b.sales; i++ {
		idle += b.writes[key(i)]
	}
	b.add("by then, changes of idle sales", float64(idle), "changes", "0")
	return nil
}

// addMemory reads the process's memory.
func (b *bench) addMemory(when string) error {
	file, err := os.Open(fmt.Sprintf("/proc/%d/status", b.manager.Process.Pid))
	if err != nil {
		return fmt.Errorf("reading the operator's memory: %w", err)
	}
	defer func() { _ = file.Close() }()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		what := map[string]string{"VmRSS": "resident", "VmHWM": "resident at most"}[name]
		if what == "" {
			continue
		}
		kb, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
		if err != nil {
			return err
		}
		b.add(fmt.Sprintf("memory, %s: %s", when, what), round(kb/1024), "MiB", "<= 150 MB")
	}
	return nil
}

// counters are the operator's own.
type counters struct{ reconciles, writes float64 }

// scrape reads the operator's metrics.
func (b *bench) scrape(ctx context.Context) (c counters, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, b.metrics, nil)
	if err != nil {
		return c, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return c, fmt.Errorf("asking the operator for its metrics: %w", err)
	}
	defer func() { _ = response.Body.Close() }()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		name, value, found := strings.Cut(lines.Text(), "} ")
		if !found {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return c, err
		}
		switch {
		case strings.HasPrefix(name, "controller_runtime_reconcile_total{"):
			c.reconciles += n
		case strings.HasPrefix(name, "rest_client_requests_total{") && !strings.Contains(name, `method="GET"`):
			c.writes += n
		}
	}
	return c, lines.Err()
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func seconds(d time.Duration) float64 { return round(d.Seconds()) }

// round keeps two decimals.
func round(v float64) float64 {
	text := strconv.FormatFloat(v, 'f', 2, 64)
	rounded, _ := strconv.ParseFloat(text, 64) // it was a number a moment ago
	return rounded
}
